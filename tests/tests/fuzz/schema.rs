//! The calls that the servers offer and the messages of these calls, from their descriptors.

use prost_reflect::{DescriptorPool, MethodDescriptor};
use zeroshard_proto::pb;

/// The process that serves a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Server {
    Coordinator,
    Shard,
    Worker,
    Mirror,
    /// The coordinator and the shard servers serve the call.
    Any,
}

/// A call.
#[derive(Debug, Clone)]
pub(crate) struct Rpc {
    pub(crate) path: String,
    pub(crate) method: MethodDescriptor,
    pub(crate) server: Server,
}

/// The descriptors of the protocol and of the services for health and reflection.
pub(crate) fn pool() -> DescriptorPool {
    let mut pool = DescriptorPool::decode(pb::FILE_DESCRIPTOR_SET).unwrap();
    pool.decode_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET).unwrap();
    pool.decode_file_descriptor_set(tonic_reflection::pb::v1::FILE_DESCRIPTOR_SET).unwrap();
    pool
}

/// All calls in the descriptors, so that future calls are included.
///
/// # Panics
/// If the process that serves a service is not known.
pub(crate) fn calls(pool: &DescriptorPool) -> Vec<Rpc> {
    let calls = pool.services().flat_map(|service| service.methods().collect::<Vec<_>>());
    let call = |method: MethodDescriptor| {
        let service = method.parent_service().full_name().to_owned();
        let server = match service.as_str() {
            "zeroshard.v1.CoordinatorService" => Server::Coordinator,
            "zeroshard.v1.ShardService" | "zeroshard.v1.DataService" => Server::Shard,
            "zeroshard.v1.WorkerService" => Server::Worker,
            "zeroshard.v1.MirrorService" => Server::Mirror,
            "grpc.health.v1.Health" | "grpc.reflection.v1.ServerReflection" => Server::Any,
            other => panic!("the process that serves {other} is not known; add the service here"),
        };
        Rpc { path: format!("/{service}/{}", method.name()), method, server }
    };
    calls.map(call).collect()
}
