//! `zsctl capture` writes a step of a job to a directory, for `zsctl replay`.

use std::{
    cell::RefCell,
    collections::BTreeMap,
    fs::{self, File},
    io::{self, BufWriter, Write},
    path::{Path, PathBuf},
};

use prost::Message;
use serde_json::json;
use zeroshard_client::{Capture, CapturedStep, Cluster, Error, Result};
use zeroshard_model::version::VERSION;
use zeroshard_proto::pb;

use crate::{print, table::human};

/// The format of the directory. A later one may have other files.
pub(crate) const FORMAT: u64 = 1;
/// The file that describes the step. It is written last.
pub(crate) const INDEX: &str = "capture.json";
/// The file with the specification of the job: a message, because JSON does not keep every number.
pub(crate) const SPEC: &str = "job.bin";

/// Flags of `zsctl capture`.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Name of the job; `zsctl status` lists the jobs
    job: String,
    /// Directory to create for the captured step
    #[arg(long, value_name = "DIRECTORY")]
    to: PathBuf,
    /// Capture only this tensor. You may repeat the flag [default: all tensors]
    #[arg(long = "tensor", value_name = "NAME")]
    tensors: Vec<String>,
    /// Wait for a step that the job's policy on spikes skips, and capture that one
    #[arg(long)]
    until_spike: bool,
    /// Number of seconds to wait for the step
    #[arg(long, value_name = "SECONDS", default_value_t = 600)]
    pub(crate) within: u64,
}

/// Captures a step.
///
/// # Errors
/// Those of [`Cluster::capture`]; [`Error::Storage`] if the directory exists or cannot be written.
pub(crate) async fn run(arguments: &Arguments, cluster: &Cluster, json: bool) -> Result<()> {
    let Arguments { job, to, tensors, until_spike, .. } = arguments;
    let tensors = Some(tensors.clone()).filter(|tensors| !tensors.is_empty());
    let capture = Capture { tensors, until_spike: *until_spike };
    let directory = Directory::create(to)?;
    let captured = cluster.capture(job, &capture, |server, one| directory.keep(server, one)).await;
    let captured = captured.inspect_err(|_| directory.remove())?;
    let bytes = directory.finish(to, &captured)?;
    let CapturedStep { step, slices, spike, .. } = &captured;
    let event = json!({
        "event": "captured", "job": job, "step": step, "slices": slices, "bytes": bytes,
        "spike": spike, "state_hash": captured.state_hash, "directory": to,
    });
    let why = spike.as_ref().map_or(String::new(), |spike| format!("\nit is a spike: {spike}"));
    let text = format!(
        "captured step {step} of job {job:?}: {slices} slices, {}{why}\n`zsctl replay {}` applies \
         it again",
        human(bytes),
        to.display()
    );
    print(json, &event, &text);
    Ok(())
}

/// A directory that is being written, beside its final place.
struct Directory {
    path: PathBuf,
    /// The file of each server.
    files: RefCell<BTreeMap<usize, BufWriter<File>>>,
}

impl Directory {
    /// Creates the directory of a capture that goes to `to`.
    fn create(to: &Path) -> Result<Self> {
        if to.exists() {
            let sentence = format!("{} exists already; choose another directory", to.display());
            return Err(Error::refused(sentence));
        }
        let mut name = to.file_name().unwrap_or_default().to_owned();
        name.push(format!(".{}.partial", std::process::id()));
        let path = to.with_file_name(name);
        fs::create_dir_all(&path).map_err(|cause| failed("write", &path, &cause))?;
        Ok(Self { path, files: RefCell::default() })
    }

    /// Adds a message to the file of a server.
    fn keep(&self, server: usize, message: &[u8]) -> Result<()> {
        let mut files = self.files.borrow_mut();
        let path = self.path.join(file_of(server));
        let written = match files.get_mut(&server) {
            Some(file) => file.write_all(message),
            None => File::create_new(&path).and_then(|file| {
                files.entry(server).or_insert(BufWriter::new(file)).write_all(message)
            }),
        };
        written.map_err(|cause| failed("write", &path, &cause))
    }

    /// Writes the index, and moves everything to its final place. Returns the size in bytes.
    fn finish(self, to: &Path, captured: &CapturedStep) -> Result<u64> {
        let mut bytes = 0;
        let files = self.files.into_inner();
        let index = index(captured, files.len());
        let write = |mut file: BufWriter<File>| {
            file.flush()?;
            file.get_ref().sync_all()?;
            Ok::<_, io::Error>(file.get_ref().metadata()?.len())
        };
        for file in files.into_values() {
            bytes += write(file).map_err(|cause| failed("write", &self.path, &cause))?;
        }
        let spec = pb::JobSpec::from(&captured.spec).encode_to_vec();
        for (name, content) in [(SPEC, spec), (INDEX, index.to_string().into_bytes())] {
            let path = self.path.join(name);
            fs::write(&path, content).map_err(|cause| failed("write", &path, &cause))?;
        }
        fs::rename(&self.path, to).map_err(|cause| failed("write", to, &cause))?;
        Ok(bytes)
    }

    /// Removes what was written of a capture that has failed.
    fn remove(&self) {
        // The error of the capture matters more.
        let _ = fs::remove_dir_all(&self.path);
    }
}

/// The file of a server in a capture.
pub(crate) fn file_of(server: usize) -> String {
    format!("server-{server}.bin")
}

/// What describes the captured step.
fn index(captured: &CapturedStep, servers: usize) -> serde_json::Value {
    let CapturedStep { spec, job_id, step, line, spike, slices, state_hash } = captured;
    json!({
        "format": FORMAT, "zeroshard": VERSION, "job": spec.name,
        "job_id": format!("{job_id:016x}"), "line": line, "step": step, "spike": spike,
        "slices": slices, "servers": servers, "state_hash": state_hash,
    })
}

/// The error of an operation on a file.
pub(crate) fn failed(action: &str, path: &Path, cause: &io::Error) -> Error {
    let (action, url) = (action.to_owned(), path.display().to_string());
    Error::Storage { action, url, cause: cause.to_string() }
}
