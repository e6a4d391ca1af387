//! The parts of a job's state. Each file alone reads and writes the fields of its part, and none
//! knows the job.

pub mod broken_links;
pub mod decided;
pub mod departed;
pub mod interrupted;
pub mod members;
pub mod memberships;
pub mod progress;
pub mod recovery;
pub mod replicas;
pub mod round;
pub mod saves;
pub mod scrub;
pub mod server_disconnects;
pub mod step_options;
pub mod uneven_inputs;
pub mod user_data;
pub mod version;
