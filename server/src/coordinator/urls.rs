//! Where jobs may save checkpoints and read them (`--checkpoint-urls`).

use zeroshard_model::{Error, Result};
use zeroshard_proto::pb;

/// The prefix of the URLs of checkpoints; `None`: every URL is permitted.
#[derive(Debug, Clone, Default)]
pub(crate) struct UrlPrefix(pub(crate) Option<String>);

impl UrlPrefix {
    /// Checks the URLs of a job that is to be created.
    ///
    /// # Errors
    /// [`Error::Invalid`].
    pub(super) fn check_job(&self, request: &pb::CreateJobRequest) -> Result<()> {
        let policy = request.spec.as_ref().and_then(|spec| spec.checkpoints.as_ref());
        policy.map_or(Ok(()), |policy| self.check(&policy.url))?;
        request.restore.as_ref().map_or(Ok(()), |restore| self.check(&restore.url))
    }

    /// Checks a URL. One with `..` is refused, because it could leave the prefix.
    ///
    /// # Errors
    /// [`Error::Invalid`].
    pub(super) fn check(&self, url: &str) -> Result<()> {
        let Some(prefix) = &self.0 else { return Ok(()) };
        let rest = url.strip_prefix(prefix.trim_end_matches('/'));
        let is_below = rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'));
        // A percent sign may encode a dot or a slash.
        let leaves = url.split('/').any(|part| part == "..") || url.contains(['%', '\\']);
        match url.is_empty() || is_below && !leaves {
            true => Ok(()),
            false => {
                let expected = format!("a URL below {prefix} (--checkpoint-urls)");
                Err(Error::invalid("URL of checkpoints", format!("{url:?}"), expected))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_is_below_the_prefix_and_cannot_leave_it() {
        let prefix = UrlPrefix(Some("s3://bucket/team/".to_owned()));
        for permitted in ["s3://bucket/team", "s3://bucket/team/", "s3://bucket/team/a/b", ""] {
            assert!(prefix.check(permitted).is_ok(), "{permitted}");
        }
        for refused in [
            "s3://bucket/team2/a",
            "s3://bucket/team/../other",
            "s3://bucket/team/%2e%2e/other",
            "file:///etc",
            "s3://bucket",
        ] {
            assert!(matches!(prefix.check(refused), Err(Error::Invalid { .. })), "{refused}");
        }
        assert!(UrlPrefix(None).check("file:///anywhere").is_ok());
    }
}
