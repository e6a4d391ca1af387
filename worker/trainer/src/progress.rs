//! Output during a run: a progress bar on a terminal, a line every few seconds elsewhere, or one
//! JSON object per line.

use std::io::{self, IsTerminal, Write};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Serialize;
use zeroshard_client::Traffic;

use super::error::{Error, Result};
use super::report::Summary;

/// The minimum time between two lines of [`Lines`].
const PAUSE: Duration = Duration::from_secs(5);

/// The result of a step.
#[derive(Debug, Clone)]
pub struct StepEvent {
    /// The number of the step.
    pub step: u64,
    /// The mean loss over the ranks in nats per character.
    pub loss: f64,
    /// The global norm of the mean gradient before clipping.
    pub gradient_norm: f64,
    /// `true` if the step was applied; false if it was skipped because of inf or NaN.
    pub applied: bool,
    /// The tensor and rank with inf or NaN, if there are any.
    pub overflow: Option<String>,
    /// The number of characters on which all workers have trained so far.
    pub tokens: u64,
    /// The number of bytes that this worker has transferred so far.
    pub traffic: Traffic,
}

/// The destination of progress events.
pub enum Output {
    /// No output.
    Quiet,
    /// Standard output, one JSON object per line.
    Json,
    /// A progress bar on standard error, which is a terminal.
    Bar(Bar),
    /// A line every few seconds on standard error, which is a file or a pipe.
    Lines(Lines),
}

impl Output {
    /// Output for people about a run of `steps` steps of this rank.
    pub fn people(rank: u32, steps: u64) -> Self {
        if !io::stderr().is_terminal() {
            return Self::Lines(Lines { rank, steps, held_out: None, first: None, printed: None });
        }
        let bar = ProgressBar::with_draw_target(Some(steps), ProgressDrawTarget::stderr());
        let style = ProgressStyle::with_template("{bar:24} {pos}/{len} {msg} {eta} left");
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        Self::Bar(Bar { bar, held_out: None, last: None })
    }

    /// Reports a step.
    ///
    /// # Errors
    /// [`Error::System`] if standard output is closed.
    pub fn step(&mut self, event: &StepEvent) -> Result<()> {
        match self {
            Self::Quiet => Ok(()),
            Self::Json => {
                let StepEvent { step, loss, gradient_norm, applied, overflow, .. } = event;
                line(&Line::Step {
                    step: *step,
                    loss: *loss,
                    gradient_norm: *gradient_norm,
                    applied: *applied,
                    overflow: overflow.as_deref(),
                })
            }
            Self::Bar(bar) => {
                bar.step(event);
                Ok(())
            }
            Self::Lines(lines) => {
                lines.step(event, Instant::now()).iter().for_each(|line| lines.print(line));
                Ok(())
            }
        }
    }

    /// Reports an evaluation after `step` steps.
    ///
    /// # Errors
    /// [`Error::System`] if standard output is closed.
    pub fn evaluation(&mut self, step: u64, eval_loss: f64) -> Result<()> {
        match self {
            Self::Quiet => Ok(()),
            Self::Json => line(&Line::Evaluation { step, eval_loss }),
            Self::Bar(bar) => {
                bar.held_out = Some(eval_loss);
                Ok(())
            }
            Self::Lines(lines) => {
                lines.held_out = Some(eval_loss);
                Ok(())
            }
        }
    }

    /// Reports that the job was at `step` and has returned to the checkpoint of `version`, because
    /// a server was lost.
    ///
    /// # Errors
    /// [`Error::System`] if standard output is closed.
    pub fn restored(&mut self, step: u64, version: u64) -> Result<()> {
        let text = format!(
            "step {step}: a shard server was lost; continuing from the checkpoint of version \
             {version}"
        );
        match self {
            Self::Quiet => Ok(()),
            Self::Json => line(&Line::Restored { step, version }),
            Self::Bar(bar) => {
                bar.bar.println(text);
                bar.last = None;
                Ok(())
            }
            Self::Lines(lines) => {
                lines.print(&text);
                lines.first = None;
                Ok(())
            }
        }
    }

    /// Clears the bar.
    pub fn finish(&mut self) {
        if let Self::Bar(bar) = self {
            bar.bar.finish_and_clear();
        }
    }
}

/// A progress bar with rates.
pub struct Bar {
    bar: ProgressBar,
    held_out: Option<f64>,
    /// The time, tokens and traffic at the end of the previous step.
    last: Option<(Instant, u64, Traffic)>,
}

impl Bar {
    fn step(&mut self, event: &StepEvent) {
        if let Some(overflow) = &event.overflow {
            self.bar.println(format!("step {}: skipped, inf or NaN in {overflow}", event.step));
        }
        let now = Instant::now();
        let rates = self.last.as_ref().map_or_else(String::new, |(then, tokens, traffic)| {
            let seconds = now.duration_since(*then).as_secs_f64();
            let gigabytes = |new: u64, old: u64| (new - old) as f64 / seconds / 1e9;
            format!(
                " · {:.0} tokens/s · pull {:.3} push {:.3} GB/s",
                (event.tokens - tokens) as f64 / seconds,
                gigabytes(event.traffic.pulled_bytes, traffic.pulled_bytes),
                gigabytes(event.traffic.pushed_bytes, traffic.pushed_bytes),
            )
        });
        self.last = Some((now, event.tokens, event.traffic));
        let held_out =
            self.held_out.map_or_else(String::new, |loss| format!(" · held-out {loss:.3}"));
        self.bar.set_message(format!("loss {:.3}{held_out}{rates} ·", event.loss));
        self.bar.set_position(event.step + 1);
    }
}

/// Lines about the progress of a rank.
pub struct Lines {
    rank: u32,
    steps: u64,
    held_out: Option<f64>,
    /// The first step of this run, and the time at its end.
    first: Option<(Instant, u64)>,
    /// The time of the last line.
    printed: Option<Instant>,
}

impl Lines {
    /// The lines to print after a step that ended at `now`: one for a step that was skipped, and
    /// one for the progress after the first step, after the last one, and every five seconds.
    fn step(&mut self, event: &StepEvent, now: Instant) -> Vec<String> {
        let StepEvent { step, loss, overflow, .. } = event;
        let skipped = |overflow| format!("step {step}: skipped, inf or NaN in {overflow}");
        let mut lines: Vec<String> = overflow.iter().map(skipped).collect();
        let &mut (began, first) = self.first.get_or_insert((now, *step));
        let done = step + 1;
        let is_due = self.printed.is_none_or(|printed| now.duration_since(printed) >= PAUSE);
        if !is_due && done < self.steps {
            return lines;
        }
        self.printed = Some(now);
        let mut line = format!("step {done} of {}, loss {loss:.3}", self.steps);
        if let Some(loss) = self.held_out {
            line += &format!(", held-out {loss:.3}");
        }
        let rate = (step - first) as f64 / now.duration_since(began).as_secs_f64();
        if rate.is_finite() && rate > 0.0 {
            let left = (self.steps.saturating_sub(done)) as f64 / rate;
            line += &format!(", {rate:.1} steps/s, {} left", duration(left));
        }
        lines.push(line);
        lines
    }

    /// Prints a line. Training continues if standard error is closed.
    fn print(&self, line: &str) {
        let rank = if self.rank == 0 { String::new() } else { format!("rank {}: ", self.rank) };
        let _ = writeln!(io::stderr().lock(), "{rank}{line}");
    }
}

/// A number of seconds with a unit, such as `12 s`, `3 min 20 s` or `2 h 5 min`.
fn duration(seconds: f64) -> String {
    match seconds.round() as u64 {
        seconds @ 0..60 => format!("{seconds} s"),
        seconds @ 60..3600 => format!("{} min {} s", seconds / 60, seconds % 60),
        seconds => format!("{} h {} min", seconds / 3600, seconds % 3600 / 60),
    }
}

/// One line of the output of `--json`.
#[derive(Debug, Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Line<'a> {
    /// The result of a step.
    Step {
        /// The number of the step.
        step: u64,
        /// The mean loss over the ranks in nats per character.
        loss: f64,
        /// The global norm of the mean gradient before clipping; null if it is not finite.
        gradient_norm: f64,
        /// `true` if the step was applied; false if it was skipped because of inf or NaN.
        applied: bool,
        /// The tensor and rank with inf or NaN, if there are any.
        #[serde(skip_serializing_if = "Option::is_none")]
        overflow: Option<&'a str>,
    },
    /// The result of an evaluation.
    Evaluation {
        /// The number of steps before the evaluation.
        step: u64,
        /// The held-out loss in nats per character.
        eval_loss: f64,
    },
    /// A server was lost, and the job has returned to a checkpoint.
    Restored {
        /// The step that was open.
        step: u64,
        /// The version of the checkpoint.
        version: u64,
    },
    /// The summary at the end of the run.
    Done(&'a Summary),
}

/// Writes one line of JSON to standard output.
///
/// # Errors
/// [`Error::System`] if standard output is closed.
pub fn line(line: &Line<'_>) -> Result<()> {
    let write = || {
        let mut out = io::stdout().lock();
        serde_json::to_writer(&mut out, line)?;
        out.write_all(b"\n")?;
        out.flush()
    };
    write().map_err(|cause| Error::System { doing: "write to standard output", cause })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(step: u64, overflow: Option<&str>) -> StepEvent {
        StepEvent {
            step,
            loss: 2.5,
            gradient_norm: 1.0,
            applied: overflow.is_none(),
            overflow: overflow.map(str::to_owned),
            tokens: 0,
            traffic: Traffic::default(),
        }
    }

    #[test]
    fn a_line_comes_after_the_first_step_every_five_seconds_and_after_the_last_step() {
        let mut lines = Lines { rank: 0, steps: 1000, held_out: None, first: None, printed: None };
        let began = Instant::now();
        let mut at = |step, ms, overflow| {
            lines.step(&event(step, overflow), began + Duration::from_millis(ms))
        };
        assert_eq!(at(0, 0, None), ["step 1 of 1000, loss 2.500"]);
        assert!(at(1, 100, None).is_empty());
        assert_eq!(at(20, 4999, Some("\"w\"")), ["step 20: skipped, inf or NaN in \"w\""]);
        let expected = "step 51 of 1000, loss 2.500, 10.0 steps/s, 1 min 35 s left";
        assert_eq!(at(50, 5000, None), [expected]);
        assert!(at(60, 9999, None).is_empty());
        let expected = "step 1000 of 1000, loss 2.500, 99.9 steps/s, 0 s left";
        assert_eq!(at(999, 10_000, None), [expected]);
    }

    #[test]
    fn a_step_line_has_its_fields() {
        let step = Line::Step {
            step: 3,
            loss: 2.5,
            gradient_norm: f64::INFINITY,
            applied: false,
            overflow: None,
        };
        let expected =
            r#"{"event":"step","step":3,"loss":2.5,"gradient_norm":null,"applied":false}"#;
        assert_eq!(serde_json::to_string(&step).unwrap(), expected);
    }
}
