//! The held-out windows of an evaluation. The evaluation itself is `levels::evaluate`.

use super::batches::Batch;

/// Windows of an evaluation: 4096 characters at a context of 64, a third of a second on one core.
const WINDOWS: usize = 64;
/// Windows of one batch.
const AT_ONCE: usize = 8;

/// The same windows at every evaluation, spread evenly over the text and not overlapping, in
/// batches of one size. `text` has more than `length` characters.
pub fn held_out_batches(text: &[u8], length: usize) -> Vec<Batch> {
    // Each window needs the character after it too.
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
    fn the_shortest_text_is_one_window() {
        let batches = held_out_batches(&[1; 9], 8);
        assert_eq!((batches.len(), batches[0].windows()), (1, 1));
        assert_eq!(held_out_batches(&[1; 81], 8).len(), 1);
    }
}
