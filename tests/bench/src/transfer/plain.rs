//! The baseline "plain tonic": the data service with generated tonic code and default settings.

use std::{pin::Pin, sync::Mutex};

use bytes::Bytes;
use futures_util::{Stream, StreamExt, stream};
use tonic::{
    Request, Response, Status, Streaming,
    transport::{Channel, server::TcpIncoming},
};
use zeroshard_proto::pb::{self, data_service_client::DataServiceClient, data_service_server};

use crate::Error;

/// The payload of one message: less than tonic's default limit of 4 MiB.
const CHUNK: usize = 1 << 20;

#[derive(Default)]
struct Plain {
    gradient: Mutex<Vec<u8>>,
}

#[tonic::async_trait]
impl data_service_server::DataService for Plain {
    type PullStream = Pin<Box<dyn Stream<Item = Result<pb::PullResponse, Status>> + Send>>;

    async fn pull(
        &self,
        request: Request<pb::PullRequest>,
    ) -> Result<Response<Self::PullStream>, Status> {
        let bytes =
            request.get_ref().extents.iter().map(|extent| extent.length as usize).sum::<usize>();
        let parameters = Bytes::from(vec![1u8; bytes.min(CHUNK)]);
        let messages = (0..bytes).step_by(CHUNK).map(move |offset| {
            let payload = parameters.slice(..CHUNK.min(bytes - offset));
            Ok(pb::PullResponse { offset: offset as u64, dtype: 1, payload, ..Default::default() })
        });
        Ok(Response::new(Box::pin(stream::iter(messages))))
    }

    async fn push(
        &self,
        request: Request<Streaming<pb::PushRequest>>,
    ) -> Result<Response<pb::PushResponse>, Status> {
        let mut messages = request.into_inner();
        let mut added = 0;
        while let Some(message) = messages.message().await? {
            let mut gradient = self.gradient.lock().map_err(|_| Status::internal("poisoned"))?;
            let offset = message.offset as usize;
            let end = offset + message.payload.len();
            if gradient.len() < end {
                gradient.resize(end, 0);
            }
            gradient[offset..end].copy_from_slice(&message.payload);
            added += message.payload.len() as u64;
        }
        Ok(Response::new(pb::PushResponse { added, duplicates: 0 }))
    }
}

/// Serves until it is killed.
pub(crate) fn serve() -> Result<(), Error> {
    tokio::runtime::Runtime::new()?.block_on(async {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
        crate::table::print_listening(&listener.local_addr()?.to_string());
        let service = data_service_server::DataServiceServer::new(Plain::default());
        // The same setting as in `Server::serve` with an address: no delay.
        let incoming = TcpIncoming::from(listener).with_nodelay(Some(true));
        Ok(tonic::transport::Server::builder()
            .add_service(service)
            .serve_with_incoming(incoming)
            .await?)
    })
}

pub(super) struct Client {
    client: DataServiceClient<Channel>,
    array: Vec<u8>,
    gradient: Bytes,
}

impl Client {
    pub(super) async fn connect(address: &str, bytes: usize) -> Result<Self, Error> {
        let client = DataServiceClient::connect(format!("http://{address}")).await?;
        Ok(Self { client, array: vec![0; bytes], gradient: vec![1; bytes].into() })
    }

    pub(super) async fn pull(&mut self) -> Result<(), Error> {
        let extents = vec![pb::Extent { slice: 0, offset: 0, length: self.array.len() as u64 }];
        let request = pb::PullRequest { extents, ..Default::default() };
        let mut messages = self.client.pull(request).await?.into_inner();
        while let Some(message) = messages.next().await {
            let message = message?;
            let offset = message.offset as usize;
            self.array[offset..offset + message.payload.len()].copy_from_slice(&message.payload);
        }
        Ok(())
    }

    pub(super) async fn push(&mut self) -> Result<(), Error> {
        let gradient = self.gradient.clone();
        let messages = (0..gradient.len()).step_by(CHUNK).map(move |offset| pb::PushRequest {
            begin: None,
            slice: 0,
            offset: offset as u64,
            dtype: 1,
            payload: gradient.slice(offset..gradient.len().min(offset + CHUNK)),
            ..Default::default()
        });
        self.client.push(stream::iter(messages)).await?;
        Ok(())
    }
}
