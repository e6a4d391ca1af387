//! Workers that send each other large messages over NCCL, between two GPUs of the fake driver.

use std::process::{Command, Output};

use zeroshard_tests::{binary, gpu::with_fake_driver};

use crate::{arguments, hash, lines, start, train};

/// A model whose hidden states and gradients are large messages.
const MODEL: &str = "--width 64 --context 32 --batch 16 --blocks 1 --heads 4 --steps 6 --shards 2 \
    --sample-chars 0";

fn over_nccl(flags: &str, failing: &str) -> Output {
    let out = tempfile::tempdir().unwrap();
    let mut command = Command::new(binary("zeroshard-worker"));
    command.args(arguments(&format!("{flags} --nccl"), out.path()));
    command.env("TMPDIR", out.path()).env("FAKE_CUDA_DEVICES", "2").env("FAKE_NCCL_FAIL", failing);
    with_fake_driver(&mut command);
    command.output().unwrap()
}

#[test]
fn results_over_nccl_are_those_over_grpc() {
    for ranks in ["--tensor-parallel 2", "--workers 2 --group 2"] {
        let flags = format!("{MODEL} {ranks}");
        let found = hash(&lines(&flags, over_nccl(&flags, "")));
        assert_eq!(found, hash(&train(&flags)), "{ranks}");
        // The messages do go over NCCL.
        let failed = over_nccl(&flags, "ncclGroupEnd:5:6");
        let text = String::from_utf8_lossy(&failed.stderr).into_owned();
        assert!(!failed.status.success() && text.contains("ncclGroupEnd"), "{ranks}: {text}");
    }
}

#[test]
fn nccl_is_refused_without_a_gpu_and_without_messages() {
    for (flags, message) in [
        ("--tensor-parallel 2 --nccl", "needs a machine with a GPU"),
        ("--workers 2 --nccl", "--nccl is present; expected absent"),
    ] {
        let output = start(&format!("{MODEL} {flags}"));
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        let has_driver = std::path::Path::new("/proc/driver/nvidia").exists();
        let is_refused = !output.status.success() && text.contains(message);
        assert!(is_refused || has_driver, "{flags}: {text}");
    }
}
