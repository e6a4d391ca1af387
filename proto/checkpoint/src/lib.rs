//! Checkpoints: one version of a job's state in an object store, or in a directory.
//!
//! ```text
//! <url>/<job>/<version, 20 digits>/manifest.json
//!                                  <save>-<server>-<number>.safetensors
//!            /claims/...
//! ```
//!
//! Servers write files of slices in parallel; the manifest is written last, and only if there is
//! none. Files without a manifest are not a checkpoint: they belong to a save that is in progress
//! or was given up. Files are never changed.
//!
//! The slices of a job follow from its tensors alone, so a checkpoint can be read by any number of
//! servers. `format` knows the keys of a slice, `manifest` the index of all files, `storage` where
//! they are, and `claims` which job they belong to; `writer` and `reader` transfer slices.
//! `model_files` writes models for other tools.

mod claims;
mod export;
mod file;
mod format;
mod hash;
mod lines;
mod manifest;
mod model_files;
mod reader;
mod storage;
mod stored;
mod unfinished;
mod upload;
mod user_data;
mod verify;
mod writer;

pub use claims::{BEAT, Claim, Claimant};
pub use export::{Export, exported_bytes};
pub use manifest::Manifest;
pub use model_files::{ModelLayout, NewModel, cannot_write, is_leftover, remove_model};
pub use reader::SavedSlice;
pub use storage::Storage;
pub use writer::{Save, Source, write};
pub use zeroshard_model::checkpoint::Part;
