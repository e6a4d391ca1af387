//! A client of the data plane that is generated from the .proto files. It sends any message, valid
//! or not.

use futures_util::Stream;
use tonic::{IntoRequest, Streaming, transport::Channel};
use zeroshard_client::Job;
use zeroshard_model::{DType, Error, Result};
use zeroshard_net::transport::endpoint;
use zeroshard_proto::{
    pb::{self, data_service_client::DataServiceClient, push_begin::Contents},
    status::from_status,
};

/// The peer in error messages.
const PEER: &str = "shard server";

async fn client(address: &str) -> Result<DataServiceClient<Channel>> {
    let channel = endpoint(address)?.connect().await;
    let channel =
        channel.map_err(|e| Error::Unavailable { peer: PEER.to_owned(), cause: e.to_string() })?;
    Ok(DataServiceClient::new(channel)
        .max_decoding_message_size(1 << 30)
        .max_encoding_message_size(1 << 30))
}

/// Pushes `messages` to the shard server at `address`.
///
/// # Errors
/// Those of the server.
pub async fn push(address: &str, messages: Vec<pb::PushRequest>) -> Result<pb::PushResponse> {
    push_stream(address, futures_util::stream::iter(messages)).await
}

/// Pushes a stream of messages, like [`push`].
///
/// # Errors
/// Those of the server.
pub async fn push_stream(
    address: &str,
    messages: impl Stream<Item = pb::PushRequest> + Send + 'static,
) -> Result<pb::PushResponse> {
    let answer = client(address).await?.push(messages).await;
    answer.map(tonic::Response::into_inner).map_err(|status| from_status(&status, PEER))
}

/// The complete response of the shard server at `address` to `request`.
///
/// # Errors
/// Those of the server.
pub async fn pull(
    address: &str,
    request: impl IntoRequest<pb::PullRequest>,
) -> Result<Vec<pb::PullResponse>> {
    let mut stream = open_pull(address, request).await?;
    let mut answer = Vec::new();
    while let Some(message) = stream.message().await.map_err(|status| from_status(&status, PEER))? {
        answer.push(message);
    }
    Ok(answer)
}

/// Starts a pull, and returns the open response.
///
/// # Errors
/// Those of the server.
pub async fn open_pull(
    address: &str,
    request: impl IntoRequest<pb::PullRequest>,
) -> Result<Streaming<pb::PullResponse>> {
    let answer = client(address).await?.pull(request).await;
    answer.map(tonic::Response::into_inner).map_err(|status| from_status(&status, PEER))
}

/// The beginning of a push of this worker in the first attempt at `step`; without `step`, of
/// initial parameters.
pub fn begin(job: &Job, step: Option<u64>) -> pb::PushBegin {
    pb::PushBegin {
        job: job.spec().name.clone(),
        job_id: job.id(),
        lease: job.lease(),
        epoch: job.epoch(),
        rank: job.rank(),
        covers: Vec::new(),
        contents: Some(step.map_or_else(|| Contents::Upload(pb::Upload::default()), gradients)),
        window: 0,
    }
}

/// The beginning of a push of new values, by this worker in the first attempt at `step`.
pub fn replacement(job: &Job, step: u64) -> pb::PushBegin {
    let contents = Some(Contents::Replacement(pb::Replacement { step, attempt: 0 }));
    pb::PushBegin { contents, ..begin(job, Some(step)) }
}

/// Gradients of the first attempt at `step`.
pub fn gradients(step: u64) -> Contents {
    Contents::Gradients(pb::Gradients { step, ..Default::default() })
}

/// The first message of a push.
pub fn open(begin: pb::PushBegin) -> pb::PushRequest {
    pb::PushRequest { begin: Some(begin), ..Default::default() }
}

/// Elements `offset..` of a slice, as f32.
pub fn extent(slice: u32, offset: u64, values: &[f32]) -> pb::PushRequest {
    let payload: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    let dtype = pb::Dtype::from(DType::F32).into();
    pb::PushRequest { slice, offset, dtype, payload: payload.into(), ..Default::default() }
}

/// A reader's request for all elements of `slices` at `version`, as f32.
pub fn read(job: &str, version: u64, slices: impl IntoIterator<Item = u32>) -> pb::PullRequest {
    let extents = slices.into_iter().map(|slice| pb::Extent { slice, offset: 0, length: 0 });
    pb::PullRequest {
        job: job.to_owned(),
        version,
        dtype: pb::Dtype::from(DType::F32).into(),
        extents: extents.collect(),
        ..Default::default()
    }
}
