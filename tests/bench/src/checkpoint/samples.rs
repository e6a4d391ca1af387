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
    /// The bytes that came from the disk, of each round.
    pub(super) read_from_disk: Vec<u64>,
    pub(super) restored_from_disk: Vec<u64>,
    /// The sum of the servers' peaks of resident memory, in bytes.
    pub(super) peak_of_restore: u64,
    /// On servers that have room for second copies of all slices.
    pub(super) with_room: Steps,
    /// On servers that have room for a few.
    pub(super) without_room: Steps,
}

/// Steps with and without a save beside them.
#[derive(Default)]
pub(super) struct Steps {
    /// Seconds.
    pub(super) step: Vec<f64>,
    pub(super) step_beside_save: Vec<f64>,
    pub(super) save_beside_steps: Vec<f64>,
    /// The sum of the servers' peaks of resident memory, in bytes.
    pub(super) peak_without_save: u64,
    pub(super) peak_with_save: u64,
}

impl Samples {
    /// One row for each operation.
    pub(super) fn rows(&self) -> Vec<Value> {
        let bytes = self.bytes as f64;
        let gbps = |seconds: f64| bytes / seconds / 1e9;
        let cold = |rounds: &[u64]| rounds.iter().all(|&read| read as f64 >= COLD * bytes);
        let of_state = |peak: u64| peak as f64 / bytes;
        let [write, save, read, restore] = [&self.write, &self.save, &self.read, &self.restore]
            .map(|seconds| median(seconds.clone()));
        let mut rows = vec![
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
        ];
        for (steps, suffix) in [(&self.with_room, ""), (&self.without_room, "-without-room")] {
            rows.extend(steps.rows(suffix, bytes, write));
        }
        rows
    }
}

impl Steps {
    /// One row for each operation, compared with the seconds of a plain `write` of a checkpoint.
    fn rows(&self, suffix: &str, bytes: f64, write: f64) -> [Value; 3] {
        let of_state = |peak: u64| peak as f64 / bytes;
        let longest = |seconds: &[f64]| seconds.iter().copied().fold(0.0, f64::max);
        let [step, beside, save] = [&self.step, &self.step_beside_save, &self.save_beside_steps]
            .map(|seconds| median(seconds.clone()));
        [
            json!({
                "operation": format!("step{suffix}"),
                "seconds": step, "longest": longest(&self.step),
                "server_peak_bytes": self.peak_without_save,
                "ratio_state": of_state(self.peak_without_save),
            }),
            json!({
                "operation": format!("step-beside-save{suffix}"),
                "seconds": beside, "longest": longest(&self.step_beside_save),
                "ratio_step": beside / step, "server_peak_bytes": self.peak_with_save,
                "ratio_state": of_state(self.peak_with_save),
            }),
            json!({
                "operation": format!("save-beside-steps{suffix}"), "seconds": save,
                "gbps": bytes / save / 1e9, "ratio_plain": write / save,
            }),
        ]
    }
}
