//! Errors survive the wire, remain distinguishable, and never exceed the size limit of headers.
//!
//! promise: invalid-input

use zeroshard_model::error::Remedy;

use super::*;

#[test]
fn an_error_survives_the_wire() {
    let errors = [
        Error::invalid("offset of slice 3", 70, "at most 64"),
        Error::refused("the request has no `turn`"),
        Error::Unauthenticated { found: "no token".into() },
        Error::StaleEpoch { job: "a".into(), epoch: 1, current: 2 },
        Error::JobFailed { job: "a".into(), reason: "server 2 is gone".into() },
        Error::StepAborted { job: "a".into(), step: 5, epoch: 2, cause: "rank 1 left".into() },
    ];
    for error in errors {
        let status = to_status(error.clone());
        assert_eq!(from_status(&status, "shard"), error);
    }
}

/// One error of each variant, with `text` in every text field.
fn every_variant(text: &str) -> Vec<Error> {
    let t = || text.to_owned();
    vec![
        Error::Invalid { what: t(), found: t(), expected: t() },
        Error::Refused { sentence: t() },
        Error::Unauthenticated { found: t() },
        Error::Forbidden { role: t(), action: t() },
        Error::Tls { peer: t(), cause: t() },
        Error::VersionMismatch { program: t(), version: t(), coordinator: t() },
        Error::UnknownJob { job: t() },
        Error::JobExists { job: t(), difference: t() },
        Error::JobFailed { job: t(), reason: t() },
        Error::NotHere { job: t(), slice: 1 },
        Error::StaleEpoch { job: t(), epoch: 1, current: 2 },
        Error::JobReplaced { job: t() },
        Error::StaleTerm { term: 1, current: 2 },
        Error::StaleAttempt { job: t(), step: 1, attempt: 2, current: 3 },
        Error::RankLeft { job: t(), rank: 1, step: 2 },
        Error::StepMismatch { job: t(), step: 1, current: 2 },
        Error::StepAborted { job: t(), step: 1, epoch: 2, cause: t() },
        Error::RolledBack { job: t(), version: 1 },
        Error::UserDataLost { job: t(), version: 1, rank: 2 },
        Error::NoCheckpoint { url: t(), job: t(), version: t() },
        Error::CheckpointDamaged { file: t(), cause: t() },
        Error::Storage { action: t(), url: t(), cause: t() },
        Error::VersionGone { job: t(), version: 1, current: 2 },
        Error::Timeout { waiting_for: t(), waited_ms: 1 },
        Error::RankTaken { job: t(), rank: 1 },
        Error::ServerIdTaken { id: 1, address: t() },
        Error::LeaseLost { job: t(), rank: 1 },
        Error::Disagreement {
            job: t(),
            step: 1,
            what: t(),
            rank: 2,
            value: t(),
            other_rank: 3,
            other_value: t(),
        },
        Error::ParkingFull { slice: 1, rank: 2, offset: 3, waiting_for: 4, budget: 5 },
        Error::OutOfMemory { what: t(), bytes: 1 },
        Error::InsufficientMemory { job: t(), bytes: 1, free: 2, servers: t() },
        Error::LimitExceeded { what: t(), limit: 1, remedy: t() },
        Error::Device { slice: Some(1), cause: t() },
        Error::Unavailable { peer: t(), cause: t() },
        Error::Internal { cause: t() },
    ]
}

#[test]
fn every_error_fits_into_the_headers_that_peers_accept() {
    // Characters of one byte, of six bytes in JSON, of two bytes, and of three bytes that need nine
    // in a header.
    for long in ["a", "\u{1}", "\"", "\u{20ac}"].map(|unit| unit.repeat(1 << 20)) {
        for error in every_variant(&long) {
            let (sent, remedy) = (code(&error), error.remedy());
            let status = to_status(error);
            let mut headers = http::HeaderMap::new();
            status.add_header(&mut headers).unwrap();
            let bytes: usize =
                headers.iter().map(|(name, value)| name.as_str().len() + value.len()).sum();
            assert!(bytes < 14 << 10, "{bytes} bytes: {status:?}");
            let received = from_status(&status, "shard");
            assert_eq!((code(&received), received.remedy()), (sent, remedy));
        }
    }
}

#[test]
fn the_reason_names_the_variant() {
    let status = to_status(Error::UnknownJob { job: "x".into() });
    assert_eq!(status.code(), Code::NotFound);
    let info = status.get_details_error_info().expect("details");
    assert_eq!(info.reason, "UNKNOWN_JOB");
}

#[test]
fn a_transport_error_can_be_retried() {
    let error = from_status(&Status::unavailable("connection reset"), "shard 1");
    assert_eq!(error.remedy(), Remedy::Retry);
}
