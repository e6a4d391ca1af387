use std::fmt;

use super::*;

#[test]
fn input_in_errors_is_truncated_and_not_formatted_further() {
    struct Endless;
    impl Display for Endless {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            loop {
                f.write_str("12345")?;
            }
        }
    }
    let Error::Invalid { what, found, .. } =
        Error::invalid("\u{20ac}".repeat(1 << 20), Endless, "short")
    else {
        panic!("invalid");
    };
    assert_eq!(what, format!("{}...", "\u{20ac}".repeat(MAX_QUOTED)));
    assert_eq!(found, format!("{}...", "12345".repeat(MAX_QUOTED / 5)));
    let exactly = "x".repeat(MAX_QUOTED);
    assert!(
        matches!(Error::invalid("a", &exactly, "b"), Error::Invalid { found, .. } if found == exactly)
    );
    let Error::Refused { sentence } = Error::refused(Endless) else { panic!("refused") };
    assert_eq!(sentence, format!("{}...", "12345".repeat(MAX_SENTENCE / 5)));
}

#[test]
fn a_server_behind_the_epoch_of_a_call_is_retried() {
    let stale = |epoch, current| Error::StaleEpoch { job: "a".into(), epoch, current };
    assert_eq!(stale(2, 1).remedy(), Remedy::Retry);
    assert_eq!(stale(1, 2).remedy(), Remedy::Refresh);
}
