//! Compiles the definitions of etcd's services with protox, so that no `protoc` is needed.

use std::error::Error;

const FILES: [&str; 2] = ["etcd.proto", "election.proto"];

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed=etcd");
    let descriptors = protox::compile(FILES, ["etcd"])?;
    tonic_prost_build::configure().build_server(false).compile_fds(descriptors)?;
    Ok(())
}
