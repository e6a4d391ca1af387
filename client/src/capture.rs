//! Captures a step of a job: what every server needs to apply it again, in the messages of the
//! servers.

use std::time::Duration;

use futures_util::future::try_join_all;
use prost::Message;
use tonic::Streaming;
use zeroshard_model::{Error, JobSpec, Result, Server, SpikeAction};
use zeroshard_net::{Deadline, transport::MAX_CONTROL_MESSAGE};
use zeroshard_proto::{
    pb::{self, CaptureResponse, capture_response::Part, shard_service_client::ShardServiceClient},
    status::from_status,
};

use crate::{Cluster, Description, pin, state::state_hash_of};

/// Which step of a job to capture.
#[derive(Debug, Clone, Default)]
pub struct Capture {
    /// The tensors, by name; `None`: all tensors of the job.
    pub tensors: Option<Vec<String>>,
    /// `true`: the first step that is a spike according to the policy of the job. `false`: the next
    /// step that begins.
    pub until_spike: bool,
}

/// A captured step.
#[derive(Debug, Clone)]
pub struct CapturedStep {
    /// The spec of the job.
    pub spec: JobSpec,
    /// The id of the job.
    pub job_id: u64,
    /// The step, which took version `step` to `step + 1`.
    pub step: u64,
    /// The line of the job.
    pub line: u64,
    /// Why the step is a spike according to the policy of the job, if it is.
    pub spike: Option<String>,
    /// The number of captured slices.
    pub slices: usize,
    /// [`Cluster::state_hash`] of the version that the step made, if all tensors were captured.
    pub state_hash: Option<String>,
}

/// The capture of one server, which has begun.
struct Begun {
    peer: String,
    messages: Streaming<CaptureResponse>,
}

/// What the messages of a server say about the step.
struct Told {
    step: pb::CapturedStep,
    /// The digests after the step.
    digests: Vec<pb::SliceDigest>,
}

impl Cluster {
    /// Captures a step of a job, and waits for it. `keep` gets each message of each server,
    /// encoded, with the position of the server; `zsctl replay` reads them. Training goes on. The
    /// captured step takes longer by the time in which servers copy and hash their slices.
    ///
    /// # Errors
    /// [`Error::UnknownJob`]; [`Error::Invalid`] for an unknown tensor, or a job without initial
    /// parameters; [`Error::OutOfMemory`] if a server has no room for it (`--pinned-bytes`);
    /// [`Error::Refused`] if another call captures a step of the job, if its policy does not skip
    /// spikes, or if ranks send new values of a trained tensor; [`Error::JobFailed`] if the job
    /// ends or returns to a checkpoint before the step; [`Error::Timeout`]; those of `keep`.
    pub async fn capture(
        &self,
        job: &str,
        capture: &Capture,
        keep: impl Fn(usize, &[u8]) -> Result<()>,
    ) -> Result<CapturedStep> {
        let deadline = Deadline::after(self.options.timeout);
        if capture.until_spike {
            check_skips(&self.describe_job(job).await?.spec)?;
        }
        // Version 0 is the beginning of step 0, and so on. A step that has begun comes too late.
        let begin = |of: Description, version, wait| async move {
            let begun = self.begin_capture(&of, version + 1, capture, (deadline, wait)).await?;
            Ok((of, begun))
        };
        let (of, begun) = self.at_version(job, None, begin).await?;
        let keep = &keep;
        let received = begun.into_iter().enumerate();
        let received = received.map(|(server, begun)| begun.receive(move |one| keep(server, one)));
        let waiting_for = || format!("a step of job {job:?} to be captured");
        let told = deadline.limit(waiting_for, try_join_all(received)).await??;
        finish(of, told)
    }

    /// All servers keep gradients from step `step` on.
    async fn begin_capture(
        &self,
        of: &Description,
        step: u64,
        capture: &Capture,
        (deadline, wait): (Deadline, Duration),
    ) -> Result<Vec<Begun>> {
        let wanted = pin::slices(of, capture.tensors.as_deref())?;
        let calls = wanted.into_iter().map(|(server, slices)| {
            let request = pb::CaptureRequest {
                job: of.spec.name.clone(),
                job_id: of.id,
                line: of.line,
                step,
                slices,
                until_spike: capture.until_spike,
            };
            self.begin_one(server, request, deadline)
        });
        let waiting_for = || "the shard servers to begin a capture".to_owned();
        Deadline::after(wait).limit(waiting_for, try_join_all(calls)).await?
    }

    async fn begin_one(
        &self,
        server: Server,
        request: pb::CaptureRequest,
        deadline: Deadline,
    ) -> Result<Begun> {
        let shard = self.shards.get(&server)?;
        let failed = |status: tonic::Status| from_status(&status, &shard.peer);
        let client = ShardServiceClient::new(shard.pull.within(deadline.left()));
        let mut client = client.max_decoding_message_size(MAX_CONTROL_MESSAGE);
        let messages = client.capture(request).await.map_err(failed)?.into_inner();
        let mut begun = Begun { peer: shard.peer.clone(), messages };
        match begun.next().await?.and_then(|message| message.part) {
            Some(Part::Begun(_)) => Ok(begun),
            _ => Err(begun.incomplete()),
        }
    }
}

impl Begun {
    async fn next(&mut self) -> Result<Option<CaptureResponse>> {
        self.messages.message().await.map_err(|status| from_status(&status, &self.peer))
    }

    fn incomplete(&self) -> Error {
        let cause = "it ended a capture before it had sent all of the step".to_owned();
        Error::Unavailable { peer: self.peer.clone(), cause }
    }

    /// Passes on all messages.
    async fn receive(mut self, keep: impl Fn(&[u8]) -> Result<()>) -> Result<Told> {
        let (mut step, mut digests, mut is_complete) = (None, Vec::new(), false);
        while let Some(message) = self.next().await? {
            keep(&message.encode_length_delimited_to_vec())?;
            match message.part {
                Some(Part::Step(found)) => step = Some(found),
                Some(Part::Slice(pb::CapturedSlice { slice, after: digest, .. })) => {
                    digests.push(pb::SliceDigest { slice, digest });
                }
                Some(Part::End(_)) => is_complete = true,
                _ => {}
            }
        }
        let step = step.filter(|_| is_complete).ok_or_else(|| self.incomplete())?;
        Ok(Told { step, digests })
    }
}

/// Checks that a job skips spikes: with another policy, no server gets a decision about one.
fn check_skips(spec: &JobSpec) -> Result<()> {
    match &spec.spikes {
        Some(policy) if policy.action == SpikeAction::Skip => Ok(()),
        _ => Err(Error::refused(format!(
            "job {:?} has no policy that skips spikes, and only a skipped spike can be captured; \
             capture the next step instead, or create the job with SpikePolicy(\"skip\")",
            spec.name
        ))),
    }
}

/// Checks that all servers have captured the same step.
fn finish(of: Description, told: Vec<Told>) -> Result<CapturedStep> {
    let name = &of.spec.name;
    let mut steps = told.iter().map(|told| &told.step);
    let first = steps.next().cloned().unwrap_or_default();
    if let Some(other) = steps.find(|other| other.step != first.step) {
        return Err(Error::refused(format!(
            "a server has captured step {} of job {name:?}, and another one step {}, because the \
             first spike came while the capture began; capture another one",
            first.step, other.step
        )));
    }
    let digests: Vec<_> = told.into_iter().flat_map(|told| told.digests).collect();
    let slices = digests.len();
    let is_whole = slices == of.spec.manifest.slices().len();
    let state_hash = is_whole.then(|| state_hash_of(&of, first.step + 1, digests)).transpose()?;
    let (job_id, line) = (of.id, of.line.unwrap_or_default());
    let spike = Some(first.spike).filter(|spike| !spike.is_empty());
    Ok(CapturedStep { spec: of.spec, job_id, step: first.step, line, spike, slices, state_hash })
}
