//! Compiles the .proto files with protox, so that no `protoc` is needed.

use std::{env, error::Error, fs, path::PathBuf};

const FILES: [&str; 6] = [
    "zeroshard/v1/types.proto",
    "zeroshard/v1/data.proto",
    "zeroshard/v1/shard.proto",
    "zeroshard/v1/mirror.proto",
    "zeroshard/v1/coordinator.proto",
    "zeroshard/v1/worker.proto",
];

/// The messages that a `JobSpec` contains, and others that checkpoints have.
const STORED: [&str; 11] = [
    "JobSpec",
    "Tensor",
    "Layout",
    "DimPlacement",
    "Mesh",
    "MeshDim",
    "Optimizer",
    "RunningAverage",
    "CheckpointPolicy",
    "SpikePolicy",
    "RecentSteps",
];

fn main() -> Result<(), Box<dyn Error>> {
    for file in FILES {
        println!("cargo::rerun-if-changed={file}");
    }
    let descriptors = protox::compile(FILES, ["."])?;
    let out = PathBuf::from(env::var("OUT_DIR")?);
    // For the reflection service.
    fs::write(out.join("zeroshard.bin"), prost::Message::encode_to_vec(&descriptors))?;
    // `bytes` fields as `Bytes`: a payload that is decoded by generated code is not copied.
    let mut build = tonic_prost_build::configure().bytes(".").codec_path("crate::codec::Codec");
    // Checkpoints contain the specification of their job as JSON. A field that an earlier version
    // did not have is absent there.
    build = build.btree_map("zeroshard.v1.Optimizer");
    for message in STORED {
        let message = format!("zeroshard.v1.{message}");
        build = build
            .type_attribute(&message, "#[derive(serde::Serialize, serde::Deserialize)]")
            .type_attribute(&message, "#[serde(default)]");
    }
    build.compile_fds(descriptors)?;
    Ok(())
}
