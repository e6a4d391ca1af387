//! Long transfers in parts, with a progress bar on the terminal.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use pyo3::prelude::*;

use crate::array::Arrays;

/// Bytes of one part, after which the bar is updated.
const PART: usize = 64 << 20;
/// Smaller transfers end before a bar could be read.
const WORTH_A_BAR: usize = 4 * PART;

/// Calls `transfer` with one part of `arrays` after another. With a label, shows a progress bar if
/// standard error is a terminal.
pub(crate) fn in_parts<'py>(
    arrays: Arrays<'py>,
    label: Option<String>,
    mut transfer: impl FnMut(Arrays<'py>) -> PyResult<()>,
) -> PyResult<()> {
    let total = arrays.iter().map(|(_, array)| array.nbytes()).sum::<usize>();
    let bar = bar(label.filter(|_| total >= WORTH_A_BAR), total);
    let (mut part, mut bytes) = (Vec::new(), 0);
    for array in arrays {
        bytes += array.1.nbytes();
        part.push(array);
        if bytes >= PART {
            transfer(std::mem::take(&mut part))?;
            bar.inc(std::mem::take(&mut bytes) as u64);
        }
    }
    if !part.is_empty() {
        transfer(part)?;
    }
    bar.finish_and_clear();
    Ok(())
}

fn bar(label: Option<String>, total: usize) -> ProgressBar {
    // This target draws nothing if standard error is not a terminal.
    let target = match label {
        Some(_) => ProgressDrawTarget::stderr(),
        None => ProgressDrawTarget::hidden(),
    };
    let style = ProgressStyle::with_template(
        "{msg} {bar:24} {bytes}/{total_bytes} {bytes_per_sec} {eta} left",
    );
    ProgressBar::with_draw_target(Some(total as u64), target)
        .with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
        .with_message(label.unwrap_or_default())
}
