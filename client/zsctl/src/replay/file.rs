//! Reads a captured step from its directory, one slice at a time.

use std::{
    fs::{self, File},
    io::{self, BufReader, Read},
    path::{Path, PathBuf},
};

use bytes::Bytes;
use prost::Message;
use serde_json::Value;
use zeroshard_client::{Error, Result};
use zeroshard_model::{AppliedSteps, JobSpec};
use zeroshard_proto::{
    Wire,
    pb::{self, capture_response::Part},
};
use zeroshard_shard::{round::Chunk, slice::CapturedSlice};

use crate::capture::{FORMAT, INDEX, SPEC, failed, file_of};

/// The largest message. Servers send parts of 1 MiB.
const MAX_MESSAGE: u64 = 64 << 20;

/// The description of a captured step.
pub(super) struct Index {
    pub(super) spec: JobSpec,
    pub(super) step: u64,
    /// The number of slices.
    pub(super) slices: u64,
    /// The number of files.
    pub(super) servers: u64,
    /// The hash of the whole state after the step, if all slices were captured.
    pub(super) state_hash: Option<String>,
}

impl Index {
    /// Reads the index of a directory.
    ///
    /// # Errors
    /// [`Error::Storage`]; [`Error::Refused`] if it is not that of a captured step.
    pub(super) fn read(directory: &Path) -> Result<Self> {
        let path = directory.join(INDEX);
        let text = fs::read(&path).map_err(|cause| failed("read", &path, &cause))?;
        let malformed = |what: &str| {
            Error::refused(format!("{} has no {what}; capture another step", path.display()))
        };
        let index: Value = serde_json::from_slice(&text).map_err(|_| malformed("valid JSON"))?;
        match index["format"].as_u64() {
            Some(FORMAT) => {}
            Some(other) => {
                return Err(Error::refused(format!(
                    "{} has format {other}, and this zsctl reads format {FORMAT}; use the zsctl \
                     that captured it",
                    path.display()
                )));
            }
            None => return Err(malformed("\"format\"")),
        }
        let number =
            |name: &str| index[name].as_u64().ok_or_else(|| malformed(&format!("{name:?}")));
        Ok(Self {
            spec: spec(directory)?,
            step: number("step")?,
            slices: number("slices")?,
            servers: number("servers")?,
            state_hash: index["state_hash"].as_str().map(str::to_owned),
        })
    }
}

/// Reads the specification of the job.
fn spec(directory: &Path) -> Result<JobSpec> {
    let path = directory.join(SPEC);
    let bytes = fs::read(&path).map_err(|cause| failed("read", &path, &cause))?;
    let spec = pb::JobSpec::decode(&bytes[..]).map_err(|_| {
        let path = path.display();
        Error::refused(format!("{path} is not a specification of a job; capture another step"))
    })?;
    spec.try_into()
}

/// The messages of one server.
pub(super) struct Messages {
    path: PathBuf,
    file: BufReader<File>,
    /// The message after the last slice that was read.
    next: Option<Part>,
}

impl Messages {
    /// Opens the file of a server. Returns it with the decision about the step.
    ///
    /// # Errors
    /// [`Error::Storage`]; [`Error::Refused`] for a malformed file.
    pub(super) fn open(directory: &Path, server: usize) -> Result<(Self, pb::CapturedStep)> {
        let path = directory.join(file_of(server));
        let file = File::open(&path).map_err(|cause| failed("read", &path, &cause))?;
        let mut messages = Self { path, file: BufReader::new(file), next: None };
        let Some(Part::Step(step)) = messages.message()? else {
            return Err(messages.malformed());
        };
        messages.next = messages.message()?;
        Ok((messages, step))
    }

    /// Reads the next slice: its description, and its content if it trains.
    ///
    /// # Errors
    /// Those of [`Self::open`].
    pub(super) fn next_slice(
        &mut self,
        spec: &JobSpec,
    ) -> Result<Option<(pb::CapturedSlice, Option<CapturedSlice>)>> {
        let slice = match self.next.take() {
            Some(Part::Slice(slice)) => slice,
            Some(Part::End(_)) => return Ok(None),
            _ => return Err(self.malformed()),
        };
        let (mut state, mut chunks) = (Vec::<Vec<u8>>::new(), Vec::new());
        loop {
            match self.message()? {
                Some(Part::State(pb::CapturedState { tensor, data })) => {
                    if tensor as usize == state.len() {
                        state.push(Vec::new());
                    }
                    let last = state.len().checked_sub(1).filter(|&last| last == tensor as usize);
                    let last = last.ok_or_else(|| self.malformed())?;
                    state[last].extend_from_slice(&data);
                }
                Some(Part::Gradient(gradient)) => chunks.push(chunk(gradient)?),
                next => {
                    self.next = next;
                    break;
                }
            }
        }
        if slice.before.is_empty() {
            return Ok(Some((slice, None)));
        }
        let applied = applied(spec, &slice)?;
        let state = state.into_iter().map(Bytes::from).collect();
        let absent = slice.absent.clone();
        let content = CapturedSlice { applied, state, chunks, absent, ..CapturedSlice::default() };
        Ok(Some((slice, Some(content))))
    }

    /// Reads the next message; `None` at the end.
    fn message(&mut self) -> Result<Option<Part>> {
        let read = self.read();
        let bytes = read.map_err(|cause| failed("read", &self.path, &cause))?;
        let Some(bytes) = bytes else { return Ok(None) };
        let message = pb::CaptureResponse::decode(bytes).map_err(|_| self.malformed())?;
        message.part.map(Some).ok_or_else(|| self.malformed())
    }

    /// Reads the bytes of the next message behind its length.
    fn read(&mut self) -> io::Result<Option<Bytes>> {
        let mut length = Vec::new();
        while length.last().is_none_or(|byte| byte & 0x80 != 0) {
            let mut byte = [0];
            match self.file.read(&mut byte)? {
                0 if length.is_empty() => return Ok(None),
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                _ => length.push(byte[0]),
            }
        }
        let length = prost::encoding::decode_varint(&mut &length[..]).unwrap_or(u64::MAX);
        if length > MAX_MESSAGE {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let mut bytes = vec![0; length as usize];
        self.file.read_exact(&mut bytes)?;
        Ok(Some(bytes.into()))
    }

    fn malformed(&self) -> Error {
        let path = self.path.display();
        Error::refused(format!("{path} is not a captured step; capture another step"))
    }
}

/// A part of a rank's gradient.
fn chunk(message: pb::CapturedGradient) -> Result<Chunk> {
    let pb::CapturedGradient { rank, offset, dtype, data: bytes } = message;
    let what = || "dtype of a captured gradient".to_owned();
    let Wire::Plain(dtype) = Wire::of_message(dtype, what)? else {
        return Err(Error::invalid(what(), "int8", "f32, bf16 or f16"));
    };
    let offset = usize::try_from(offset).unwrap_or(usize::MAX);
    Ok(Chunk { rank, offset, dtype, bytes })
}

/// The steps that were applied to a slice before.
fn applied(spec: &JobSpec, slice: &pb::CapturedSlice) -> Result<AppliedSteps> {
    let Some(cut) = spec.manifest.slices().get(slice.slice as usize) else {
        let expected =
            format!("less than the job's number of slices, {}", spec.manifest.slices().len());
        return Err(Error::invalid("slice", slice.slice, expected));
    };
    let steps = slice.steps.clone().unwrap_or_default();
    let applied = spec.applied_to(cut.tensor, steps.applied, &steps.scalar_state)?;
    Ok(AppliedSteps { averaged: steps.averaged, ..applied })
}
