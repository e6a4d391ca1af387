//! Compiles the .proto files with protox, so that no `protoc` is needed.

use std::{env, error::Error, fs, path::PathBuf};

const FILES: [&str; 5] = [
    "zeroshard/v1/types.proto",
    "zeroshard/v1/data.proto",
    "zeroshard/v1/shard.proto",
    "zeroshard/v1/coordinator.proto",
    "zeroshard/v1/worker.proto",
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
    tonic_prost_build::configure().bytes(".").compile_fds(descriptors)?;
    Ok(())
}
