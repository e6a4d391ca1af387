//! Tests of the limits of a token: a call beyond a limit is refused with an error that names the
//! limit, and other tokens are not affected.
//!
//! promise: isolation

use std::time::Instant;

use zeroshard_client::Error;
use zeroshard_model::{JobSpec, TensorSpec};
use zeroshard_tests::training;

use crate::{
    adamw, job,
    roles::{Guarded, new_token_with},
};

/// Starts a cluster with two tokens: one for the job `limited` with these limits, and one for the
/// job `free`.
fn cluster(limits: &[&str]) -> Guarded {
    let tokens: [(_, &[&str]); 3] = [("server", &[]), ("job:free", &[]), ("job:limited", limits)];
    Guarded::start_with(tokens.map(|(role, limits)| (role, new_token_with(role, limits))))
}

/// The specification of a job with this number of parameters, each of which needs 16 bytes.
fn sized(name: &str, numel: u64) -> JobSpec {
    job(name, 1, adamw(), vec![TensorSpec::new("w", [numel])])
}

fn limit(refused: Result<(), Error>) -> (String, u64) {
    match refused {
        Err(Error::LimitExceeded { what, limit, .. }) => (what, limit),
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_token_is_limited_to_its_number_of_jobs_and_others_are_not() {
    let guarded = cluster(&["--jobs", "2"]);
    let (limited, free) = (guarded.client("job:limited").await, guarded.client("job:free").await);
    for name in ["limited/a", "limited/b"] {
        limited.create_job(&sized(name, 1)).await.unwrap();
    }
    let (what, of) = limit(limited.create_job(&sized("limited/c", 1)).await);
    assert!(of == 2 && what.contains("job:limited") && what.contains("`jobs`"), "{what}");
    // An existing job does not count again.
    limited.create_job(&sized("limited/b", 1)).await.unwrap();
    for name in ["free/a", "free/b", "free/c"] {
        free.create_job(&sized(name, 1)).await.unwrap();
    }
    limited.delete_job("limited/a").await.unwrap();
    limited.create_job(&sized("limited/c", 1)).await.unwrap();
}

#[tokio::test]
async fn the_jobs_of_a_token_share_its_memory_limit() {
    let guarded = cluster(&["--memory", "1MiB"]);
    let client = guarded.client("job:limited").await;
    // At 16 bytes for each parameter, this job needs three quarters of the limit.
    client.create_job(&sized("limited/a", 48 << 10)).await.unwrap();
    let (what, of) = limit(client.create_job(&sized("limited/b", 17 << 10)).await);
    assert_eq!(of, 1 << 20);
    for number in [48 << 14, 17 << 14] {
        assert!(what.contains(&number.to_string()), "{what}");
    }
    guarded.client("job:free").await.create_job(&sized("free", 1 << 20)).await.unwrap();
    client.create_job(&sized("limited/b", 16 << 10)).await.unwrap();
}

#[tokio::test]
async fn calls_above_the_rate_of_a_token_wait_or_are_refused_and_others_continue() {
    let guarded = cluster(&["--requests", "20"]);
    let limited = guarded.client("job:limited").await;
    let began = Instant::now();
    for _ in 0..30 {
        limited.status().await.unwrap();
    }
    // Twenty calls are accepted immediately, and ten more take half a second.
    assert!(began.elapsed().as_millis() >= 450, "{:?}", began.elapsed());
    let calls = (0..200).map(|_| limited.status());
    let answers = futures_util::future::join_all(calls).await;
    let refused = answers.iter().filter(|answer| answer.is_err()).collect::<Vec<_>>();
    assert!(refused.len() > 100, "{}", refused.len());
    assert!(
        refused.iter().all(|answer| matches!(answer, Err(Error::LimitExceeded { limit: 20, .. })))
    );
    let job = guarded.rank("job:free", "free").await;
    for step in 0..30 {
        assert!(training::step(&job, step).await.unwrap().applied);
    }
}
