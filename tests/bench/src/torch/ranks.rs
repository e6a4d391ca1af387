//! The processes of one measurement: `step.py`, once for each rank.

use std::{
    fs::{self, File},
    path::Path,
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use serde::Deserialize;
use tempfile::TempDir;

use super::Error;

/// The script of the ranks.
const SCRIPT: &str = include_str!("../../torch/step.py");
/// The time limit of one measurement, from the start of Python.
const TIMEOUT: Duration = Duration::from_secs(600);
/// The interval at which the processes are checked.
const POLL: Duration = Duration::from_millis(50);
/// The number of lines of a failed rank's log that are shown.
const LOG_LINES: usize = 15;

/// The result of one measurement.
#[derive(Debug, Clone)]
pub(super) struct Sample {
    pub(super) params: u64,
    /// The tokens of a rank in a step; 0 if the inputs have none.
    pub(super) tokens: u64,
    /// The mean time of the measured steps in seconds.
    pub(super) seconds: f64,
    /// The loss of the last step, averaged over the ranks.
    pub(super) loss: f64,
    /// The peak of the resident memory of each rank during the measured steps.
    pub(super) peak_bytes: Vec<u64>,
    /// The peak of the GPU's memory of rank 0; 0 on the CPU.
    pub(super) gpu_peak_bytes: u64,
    /// The sum of the peaks of the servers over their whole life; `None` without servers, or if
    /// they run inside rank 0.
    pub(super) server_peak_bytes: Option<u64>,
}

/// The output of one rank.
#[derive(Debug, Deserialize)]
struct Output {
    params: u64,
    tokens: u64,
    seconds: f64,
    loss: f64,
    peak_bytes: u64,
    gpu_peak_bytes: u64,
}

impl Sample {
    /// Parses the outputs of the ranks, rank by rank.
    fn parse(texts: &[String]) -> Result<Self, Error> {
        let parse = |text: &String| {
            serde_json::from_str::<Output>(text)
                .map_err(|e| format!("invalid result of a rank, {text:?}: {e}"))
        };
        let outputs = texts.iter().map(parse).collect::<Result<Vec<_>, _>>()?;
        let Some(&Output { params, tokens, seconds, loss, gpu_peak_bytes, .. }) = outputs.first()
        else {
            return Err("no rank has a result".into());
        };
        if !(seconds.is_finite() && seconds > 0.0) {
            return Err(format!("a step took {seconds} seconds").into());
        }
        let peak_bytes = outputs.iter().map(|output| output.peak_bytes).collect();
        let server_peak_bytes = None;
        Ok(Self { params, tokens, seconds, loss, peak_bytes, gpu_peak_bytes, server_peak_bytes })
    }
}

/// Running ranks, which are killed when dropped.
#[derive(Debug)]
pub(super) struct Ranks {
    children: Vec<Child>,
    folder: TempDir,
}

impl Ranks {
    /// Starts `world` ranks with these arguments of the script and variables of the environment.
    pub(super) fn start(
        python: &Path,
        arguments: &[(&str, String)],
        env: &[(&str, &str)],
        world: usize,
    ) -> Result<Self, Error> {
        let folder = TempDir::with_prefix("zs-bench-")?;
        fs::write(folder.path().join("step.py"), SCRIPT)?;
        let mut ranks = Self { children: Vec::new(), folder };
        for rank in 0..world {
            let mut command = Command::new(python);
            command.envs([("RANK", rank.to_string()), ("LOCAL_RANK", rank.to_string())]);
            command.env("WORLD_SIZE", world.to_string()).envs(env.iter().copied());
            ranks.children.push(start_rank(command, arguments, ranks.folder.path(), rank)?);
        }
        Ok(ranks)
    }

    /// Waits until all ranks have ended. If a rank fails, the others are killed, and the error
    /// contains its log.
    pub(super) fn finish(mut self) -> Result<Sample, Error> {
        let deadline = Instant::now() + TIMEOUT;
        loop {
            let mut running = false;
            for (rank, child) in self.children.iter_mut().enumerate() {
                match child.try_wait()? {
                    None => running = true,
                    Some(status) if status.success() => {}
                    Some(status) => {
                        let log = log_tail(&self.folder.path().join(log_name(rank)));
                        return Err(format!("rank {rank} ended with {status}:\n{log}").into());
                    }
                }
            }
            if !running {
                break;
            }
            if Instant::now() > deadline {
                return Err(format!("the ranks did not end within {TIMEOUT:?}").into());
            }
            thread::sleep(POLL);
        }
        let read = |rank| {
            let text = fs::read_to_string(self.folder.path().join(output_name(rank)));
            text.map_err(|e| format!("rank {rank} wrote no result: {e}"))
        };
        Sample::parse(&(0..self.children.len()).map(read).collect::<Result<Vec<_>, _>>()?)
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        for child in &mut self.children {
            // This fails only if the process has already ended.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn start_rank(
    mut command: Command,
    arguments: &[(&str, String)],
    folder: &Path,
    rank: usize,
) -> Result<Child, Error> {
    let log = File::create(folder.join(log_name(rank)))?;
    command.arg(folder.join("step.py"));
    command.arg("--store").arg(folder.join("store"));
    command.arg("--output").arg(folder.join(output_name(rank)));
    for (flag, value) in arguments {
        command.args([*flag, value]);
    }
    command.env("GLOO_SOCKET_IFNAME", "lo");
    command.env_remove("ZEROSHARD_ADDRESS");
    command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
    Ok(command.spawn()?)
}

fn log_name(rank: usize) -> String {
    format!("rank{rank}.log")
}

fn output_name(rank: usize) -> String {
    format!("rank{rank}.json")
}

/// The end of a log.
fn log_tail(path: &Path) -> String {
    let log = fs::read(path).unwrap_or_default();
    let log = String::from_utf8_lossy(&log);
    let lines: Vec<_> = log.lines().filter(|line| !line.trim().is_empty()).collect();
    lines[lines.len().saturating_sub(LOG_LINES)..].join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    const OUTPUT: &str = r#"{"params": 8, "tokens": 4, "seconds": 0.5, "loss": 1.5, "peak_bytes": 100, "gpu_peak_bytes": 0}"#;

    #[test]
    fn seconds_are_those_of_rank_zero_and_memory_is_per_rank() {
        let other = OUTPUT.replace("100", "200").replace("0.5", "0.6");
        let sample = Sample::parse(&[OUTPUT.to_owned(), other]);
        let sample = sample.unwrap_or_else(|e| unreachable!("{e}"));
        assert_eq!((sample.params, sample.seconds, sample.loss), (8, 0.5, 1.5));
        assert_eq!(sample.peak_bytes, [100, 200]);
    }

    #[test]
    fn an_invalid_result_is_an_error() {
        for wrong in
            ["", "{}", "nan", &OUTPUT.replace("0.5", "0.0"), &OUTPUT.replace("\"params\": 8, ", "")]
        {
            assert!(Sample::parse(&[wrong.to_owned(), OUTPUT.to_owned()]).is_err(), "{wrong:?}");
        }
    }
}
