//! Connections: addresses, TLS, tokens and roles, deadlines, and traces.

pub mod deadline;
pub mod numbers;
pub mod reloaded;
pub mod token;
pub mod tokens;
pub mod trace;
pub mod transport;

pub use deadline::Deadline;
pub use token::Token;
pub use tokens::{Credential, Tokens};
