//! The calls that the servers offer, and the messages of these calls, as their descriptors say.

use prost_reflect::{DescriptorPool, MethodDescriptor};
use zeroshard_proto::pb;

/// The process that serves a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Server {
    Coordinator,
    Shard,
    Worker,
    /// The coordinator and the shard servers.
    Any,
}

/// A call.
#[derive(Debug, Clone)]
pub(crate) struct Rpc {
    pub(crate) path: String,
    pub(crate) method: MethodDescriptor,
    pub(crate) server: Server,
}

/// All messages of the protocol, and of the services for health and reflection.
pub(crate) fn pool() -> DescriptorPool {
    let mut pool = DescriptorPool::decode(pb::FILE_DESCRIPTOR_SET).unwrap();
    pool.decode_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET).unwrap();
    pool.decode_file_descriptor_set(tonic_reflection::pb::v1::FILE_DESCRIPTOR_SET).unwrap();
    pool
}

/// All calls, also those that are added to the protocol later.
///
/// # Panics
/// For a service of which it is not known who serves it.
pub(crate) fn calls(pool: &DescriptorPool) -> Vec<Rpc> {
    let calls = pool.services().flat_map(|service| service.methods().collect::<Vec<_>>());
    let call = |method: MethodDescriptor| {
        let service = method.parent_service().full_name().to_owned();
        let server = match service.as_str() {
            "zeroshard.v1.CoordinatorService" => Server::Coordinator,
            "zeroshard.v1.ShardService" | "zeroshard.v1.DataService" => Server::Shard,
            "zeroshard.v1.WorkerService" => Server::Worker,
            "grpc.health.v1.Health" | "grpc.reflection.v1.ServerReflection" => Server::Any,
            other => panic!("which process serves {other}? Add it here, so that it is fuzzed"),
        };
        Rpc { path: format!("/{service}/{}", method.name()), method, server }
    };
    calls.map(call).collect()
}
