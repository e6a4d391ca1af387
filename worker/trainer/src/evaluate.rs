//! Selects the held-out windows of an evaluation. `levels::evaluate` computes their loss.

use super::batches::Batch;

/// The maximum number of windows in an evaluation. With a context of 64 they have 4096 characters
/// and take a third of a second on one core.
const WINDOWS: usize = 64;
/// The maximum number of windows in a batch.
const AT_ONCE: usize = 8;

/// Returns windows that are spread evenly over the text and do not overlap, in batches of the same
/// size. The result is the same for every evaluation. `text` must have more than `length`
/// characters.
pub fn held_out_batches(text: &[u8], length: usize) -> Vec<Batch> {
    // Each window also needs the character after it.
    let fitting = (text.len() - 1) / length;
    let at_once = fitting.min(AT_ONCE);
    let count = fitting.min(WINDOWS) / at_once * at_once;
    let starts: Vec<usize> = (0..count).map(|i| i * fitting / count * length).collect();
    starts.chunks(at_once).map(|starts| Batch::cut(text, starts, length)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_are_spread_over_the_text_and_do_not_overlap() {
        let text: Vec<u8> = (0..100_000usize).map(|i| (i / 500) as u8).collect();
        let batches = held_out_batches(&text, 50);
        let firsts: Vec<u8> =
            batches.iter().flat_map(|b| b.inputs().chunks(50).map(|w| w[0])).collect();
        assert_eq!(firsts.len(), WINDOWS);
        assert!(firsts.is_sorted() && firsts[WINDOWS - 1] > 190, "{firsts:?}");
    }

    #[test]
    fn the_shortest_text_gives_one_window() {
        let batches = held_out_batches(&[1; 9], 8);
        assert_eq!((batches.len(), batches[0].windows()), (1, 1));
        assert_eq!(held_out_batches(&[1; 81], 8).len(), 1);
    }
}
