//! Connections: addresses, TLS, tokens and roles, deadlines, and traces.

pub mod deadline;
pub mod quota;
pub mod reloaded;
pub mod role;
pub mod token;
pub mod trace;
pub mod transport;

pub use deadline::Deadline;
pub use role::{Credential, Role, Tokens};
pub use token::Token;
