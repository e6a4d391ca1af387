//! Calls that fail on request.

use crate::codes::Code;

/// Has one call fail.
#[derive(Debug, Clone)]
pub(crate) struct Injection {
    /// The name of the function; empty: any function.
    pub(crate) function: String,
    /// The number of calls before it.
    pub(crate) after: u64,
    pub(crate) code: Code,
    /// The operation that the call enqueues fails when it runs, and a later call tells it.
    pub(crate) is_late: bool,
}

/// The failures that are yet to come.
#[derive(Debug, Default)]
pub(crate) struct Injections {
    pending: Vec<Injection>,
    /// The error of the operation that is enqueued next.
    late: Option<Code>,
}

impl Injections {
    pub(crate) fn add(&mut self, injection: Injection) {
        self.pending.push(injection);
    }

    /// Counts a call. Returns the error with which it fails.
    pub(crate) fn fail(&mut self, function: &str) -> Option<Code> {
        let mut failed = None;
        self.pending.retain_mut(|injection| {
            if !injection.function.is_empty() && injection.function != function {
                return true;
            }
            if injection.after > 0 {
                injection.after -= 1;
                return true;
            }
            failed = Some((injection.code, injection.is_late));
            false
        });
        match failed? {
            (code, false) => Some(code),
            (code, true) => {
                self.late = Some(code);
                None
            }
        }
    }

    /// The error of an operation that is enqueued now.
    pub(crate) fn take_late(&mut self) -> Option<Code> {
        self.late.take()
    }
}
