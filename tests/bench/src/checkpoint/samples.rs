//! The measurements of all rounds, and their medians.

use serde_json::{Value, json};

use crate::sample::median;

/// The part of the bytes that must come from the disk for reads to count as cold: the page cache
/// may keep a few pages.
const COLD: f64 = 0.95;

/// The measurements of all rounds. The operations are described in [`super::Options`].
#[derive(Default)]
pub(super) struct Samples {
    /// The bytes of a checkpoint's data files.
    pub(super) bytes: u64,
    /// Seconds.
    pub(super) write: Vec<f64>,
    pub(super) save: Vec<f64>,
    pub(super) read: Vec<f64>,
    pub(super) restore: Vec<f64>,
    pub(super) step: Vec<f64>,
    pub(super) step_beside_save: Vec<f64>,
    pub(super) save_beside_steps: Vec<f64>,
    /// The bytes that came from the disk, of each round.
    pub(super) read_from_disk: Vec<u64>,
    pub(super) restored_from_disk: Vec<u64>,
    /// The sum of the servers' peaks of resident memory, in bytes.
    pub(super) peak_without_save: u64,
    pub(super) peak_with_save: u64,
    pub(super) peak_of_restore: u64,
}

impl Samples {
    /// One row for each operation.
    pub(super) fn rows(&self) -> [Value; 7] {
        let bytes = self.bytes as f64;
        let gbps = |seconds: f64| bytes / seconds / 1e9;
        let cold = |rounds: &[u64]| rounds.iter().all(|&read| read as f64 >= COLD * bytes);
        let of_state = |peak: u64| peak as f64 / bytes;
        let [write, save, read, restore, step, step_beside, save_beside] = [
            &self.write,
            &self.save,
            &self.read,
            &self.restore,
            &self.step,
            &self.step_beside_save,
            &self.save_beside_steps,
        ]
        .map(|seconds| median(seconds.clone()));
        [
            json!({"operation": "write", "seconds": write, "gbps": gbps(write)}),
            json!({
                "operation": "save", "seconds": save, "gbps": gbps(save),
                "ratio_plain": write / save,
            }),
            json!({
                "operation": "read", "seconds": read, "gbps": gbps(read),
                "cold": cold(&self.read_from_disk),
            }),
            json!({
                "operation": "restore", "seconds": restore, "gbps": gbps(restore),
                "ratio_plain": read / restore, "cold": cold(&self.restored_from_disk),
                "server_peak_bytes": self.peak_of_restore,
                "ratio_state": of_state(self.peak_of_restore),
            }),
            json!({
                "operation": "step", "seconds": step,
                "server_peak_bytes": self.peak_without_save,
                "ratio_state": of_state(self.peak_without_save),
            }),
            json!({
                "operation": "step-beside-save", "seconds": step_beside,
                "ratio_step": step_beside / step, "server_peak_bytes": self.peak_with_save,
                "ratio_state": of_state(self.peak_with_save),
            }),
            json!({
                "operation": "save-beside-steps", "seconds": save_beside,
                "gbps": gbps(save_beside), "ratio_plain": write / save_beside,
            }),
        ]
    }
}
