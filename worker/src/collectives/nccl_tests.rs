//! Tests of messages over NCCL, in processes with the fake driver and the fake NCCL
//! (`tests/fake-cuda`).

use std::{
    env,
    hash::{DefaultHasher, Hash, Hasher},
    os::unix::fs::symlink,
    process::Command,
    time::{Duration, Instant},
};

use zeroshard_model::Reduction;

use super::testing::{OVER_NCCL, together, together_over_grpc};
use super::{Collectives, Result};

/// Enough elements for NCCL and for the ring.
const MANY: usize = 100_003;
/// The variable with the result that the other process must find.
const EXPECTED: &str = "ZEROSHARD_TEST_EXPECTED";

/// Runs tests in a process whose driver and NCCL are fake, and which is aborted when it uses a
/// device wrongly. Returns its output.
fn over_nccl(filter: &[&str], settings: &[(&str, String)]) -> String {
    let exe = env::current_exe().unwrap();
    let directory = tempfile::tempdir().unwrap();
    for name in ["libcuda.so", "libnccl.so"] {
        symlink(exe.with_file_name("libfake_cuda.so"), directory.path().join(name)).unwrap();
    }
    let mut command = Command::new(exe);
    command.args(filter).env("LD_LIBRARY_PATH", directory.path()).env("TMPDIR", directory.path());
    command.env("FAKE_CUDA_DEVICES", "8").env("FAKE_CUDA_ABORT", "1").env(OVER_NCCL, "1");
    let done = command.envs(settings.iter().cloned()).output().unwrap();
    let output = String::from_utf8_lossy(&[done.stdout, done.stderr].concat()).into_owned();
    assert!(done.status.success(), "{output}");
    output
}

fn is_alone() -> bool {
    env::var_os(OVER_NCCL).is_some()
}

#[test]
fn all_tests_of_collectives_pass_over_nccl() {
    let output = over_nccl(&["collectives::tests::"], &[]);
    let passed = output.split_once(" passed").unwrap().0.rsplit(' ').next().unwrap();
    assert!(passed.parse::<u32>().unwrap() >= 15, "{output}");
}

/// The results of collectives with large and small messages, as a hash of their bits.
fn results() -> String {
    let value = |rank: u32, i: usize| ((i * 7919 + rank as usize * 104_729) % 2003) as f32 / 7.0;
    let found = together(3, |peers| {
        let data = |count| (0..count).map(|i| value(peers.rank(), i)).collect::<Vec<_>>();
        let parts = || vec![data(MANY), data(10), data(MANY / 2)];
        let sizes = vec![parts()[peers.rank() as usize].len(); 3];
        let group = [0, 1, 2];
        let mut found = vec![peers.all_reduce(&group, Reduction::Sum, data(MANY)).unwrap()];
        found.extend(peers.all_gather(&group, &[MANY; 3], data(MANY)).unwrap());
        found.push(peers.reduce_scatter(&group, Reduction::Avg, parts()).unwrap());
        found.extend(peers.all_to_all(&group, &sizes, parts()).unwrap());
        peers.send((peers.rank() + 1) % 3, data(MANY)).unwrap();
        found.push(peers.recv((peers.rank() + 2) % 3, MANY).unwrap());
        found.concat().iter().map(|value| value.to_bits()).collect::<Vec<_>>()
    });
    let mut hasher = DefaultHasher::new();
    found.hash(&mut hasher);
    format!("{:x}", hasher.finish())
}

#[test]
fn the_bits_do_not_depend_on_the_way_of_messages() {
    let found = results();
    match env::var(EXPECTED) {
        Ok(expected) => assert_eq!(found, expected),
        Err(_) => {
            let name = "collectives::nccl_tests::the_bits_do_not_depend_on_the_way_of_messages";
            for seed in 0..5 {
                let settings =
                    [(EXPECTED, found.clone()), ("FAKE_CUDA_SEED", format!("{}", seed * 100))];
                let output = over_nccl(&["--exact", name], &settings);
                assert!(output.contains("1 passed"), "{output}");
            }
        }
    }
}

/// An all-reduce of two ranks, on these devices.
fn all_reduce(devices: [usize; 2]) -> Vec<Result<Vec<f32>>> {
    together_over_grpc(2, |peers| {
        peers.use_nccl(devices[peers.rank() as usize])?;
        peers.all_reduce(&[0, 1], Reduction::Sum, vec![1.0; MANY])
    })
}

#[test]
fn a_failing_call_is_an_error_that_names_it_and_the_other_rank_does_not_wait() {
    if is_alone() {
        let Ok(failing) = env::var("FAKE_NCCL_FAIL") else { return };
        let function = failing.split(':').next().unwrap();
        let begin = Instant::now();
        let results = all_reduce([0, 1]);
        // The other rank may have got all that it needs.
        let names = |result: &Result<_>| {
            result.as_ref().is_err_and(|error| error.to_string().contains(function))
        };
        assert!(results.iter().any(names), "{results:?}");
        assert!(begin.elapsed() < Duration::from_secs(30));
        return;
    }
    let name = "collectives::nccl_tests::\
                a_failing_call_is_an_error_that_names_it_and_the_other_rank_does_not_wait";
    let calls = [
        "ncclGetUniqueId",
        "ncclCommInitRankConfig",
        "ncclCommGetAsyncError",
        "ncclGroupStart",
        "ncclSend",
        "ncclRecv",
        "ncclGroupEnd",
    ];
    for call in calls {
        let settings = [("FAKE_NCCL_FAIL", format!("{call}:0:3"))];
        let output = over_nccl(&["--exact", name], &settings);
        assert!(output.contains("1 passed"), "{call}: {output}");
    }
}

#[test]
fn two_ranks_on_one_gpu_are_refused_on_both() {
    if is_alone() {
        let errors = all_reduce([2, 2]).into_iter().map(Result::unwrap_err);
        let texts: Vec<_> = errors.map(|error| error.to_string()).collect();
        assert!(texts.iter().any(|text| text.contains("ncclInvalidUsage")), "{texts:?}");
        return;
    }
    let name = "collectives::nccl_tests::two_ranks_on_one_gpu_are_refused_on_both";
    let output = over_nccl(&["--exact", name], &[]);
    assert!(output.contains("1 passed"), "{output}");
}

#[test]
fn without_nccl_every_rank_says_what_is_missing() {
    if is_alone() {
        return;
    }
    for result in all_reduce([0, 1]) {
        let error = result.unwrap_err().to_string();
        // On a machine with NCCL and without these GPUs, that is what is missing.
        assert!(error.contains("libnccl.so was not found") || error.contains("cuda:"), "{error}");
    }
}
