//! Child processes that take orders on standard input, and answer with lines of JSON on standard
//! output.

use std::{
    io::{BufRead, BufReader, Write},
    process::{Child, ChildStdin, Command, Stdio},
    sync::mpsc::{self, Receiver},
    thread,
    time::Duration,
};

use serde_json::Value;

use crate::Error;

/// A child process, which is killed when dropped.
pub(crate) struct Talker {
    name: String,
    child: Child,
    orders: ChildStdin,
    answers: Receiver<Value>,
}

impl Talker {
    /// Starts a process. `name` is its name in errors.
    ///
    /// # Errors
    /// If the process cannot be started.
    pub(crate) fn start(name: &str, command: &mut Command) -> Result<Self, Error> {
        let child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
        let mut child = child.map_err(|e| format!("cannot start {name}: {e}"))?;
        let output = child.stdout.take().ok_or("standard output is not piped")?;
        let orders = child.stdin.take().ok_or("standard input is not piped")?;
        let (sender, answers) = mpsc::channel();
        thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                // The receiver is dropped if the measurement has failed.
                let _ = serde_json::from_str(&line).map(|answer| sender.send(answer));
            }
        });
        Ok(Self { name: name.to_owned(), child, orders, answers })
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// Sends an order, which is a line.
    ///
    /// # Errors
    /// If the process has ended.
    pub(crate) fn tell(&mut self, order: &str) -> Result<(), Error> {
        writeln!(self.orders, "{order}").map_err(|e| format!("{} has ended: {e}", self.name).into())
    }

    /// Waits for the next answer.
    ///
    /// # Errors
    /// If there is none in time, or the process has ended.
    pub(crate) fn answer(&self, within: Duration) -> Result<Value, Error> {
        let answer = self.answers.recv_timeout(within);
        answer.map_err(|e| format!("{} does not answer: {e}", self.name).into())
    }

    /// Sends an order, and waits for the answer.
    ///
    /// # Errors
    /// Those of [`Self::tell`] and [`Self::answer`].
    pub(crate) fn ask(&mut self, order: &str, within: Duration) -> Result<Value, Error> {
        self.tell(order)?;
        self.answer(within)
    }
}

/// Answers the parent process.
#[expect(clippy::print_stdout, reason = "the parent reads it")]
pub(crate) fn say(answer: &Value) {
    println!("{answer}");
}

impl Drop for Talker {
    fn drop(&mut self) {
        // An error means that the process has already ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
