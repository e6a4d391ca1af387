//! What a pane shows, and what is its own.

use super::*;

/// A segment of four pages, filled with 1, 2, 3 and 4.
fn segment() -> (Segment, Arc<View>) {
    let segment = Segment::create("test", 4 * PAGE).unwrap();
    for page in 0..4 {
        // SAFETY: nobody else has the segment.
        unsafe { segment.bytes_mut(page * PAGE..(page + 1) * PAGE) }.fill(page as u8 + 1);
    }
    let view = Arc::new(View::new(segment.read_only().unwrap(), 4 * PAGE).unwrap());
    (segment, view)
}

fn keeper() -> (Arc<()>, Option<Keeper>) {
    let token = Arc::new(());
    (token.clone(), Some(Box::new(token)))
}

fn show(pane: &Pane, range: Range<usize>, view: &Arc<View>, at: usize) -> Arc<()> {
    let (token, mut keeper) = keeper();
    assert!(pane.show(range, view, at as u64, &mut keeper).unwrap());
    assert!(keeper.is_none(), "the pane has it");
    token
}

fn write(pane: &Pane, at: usize, value: u8) {
    assert!(at < pane.len());
    // SAFETY: the byte is within the pane, and no reference to it exists.
    unsafe { ((pane.address() + at) as *mut u8).write(value) }
}

fn pages(pane: &Pane) -> Vec<u8> {
    pane.bytes(0..pane.len()).iter().copied().step_by(PAGE).collect()
}

#[test]
fn a_pane_shows_what_it_is_told_and_keeps_the_last_keeper() {
    let (_segment, view) = segment();
    let pane = Pane::new(2 * PAGE).unwrap();
    assert_eq!((pages(&pane), pane.is_shown()), (vec![0, 0], false));
    let mut before: Option<Arc<()>> = None;
    // Two parts in turn, each also twice, and a third one.
    for (at, expected) in
        [(0, [1, 2]), (2, [3, 4]), (2, [3, 4]), (0, [1, 2]), (1, [2, 3]), (2, [3, 4])]
    {
        let token = show(&pane, 0..2 * PAGE, &view, at * PAGE);
        assert_eq!(pages(&pane), expected);
        assert!(before.is_none_or(|before| Arc::strong_count(&before) == 1), "it was dropped");
        assert_eq!(Arc::strong_count(&token), 2);
        before = Some(token);
    }
    pane.release();
    assert_eq!(Arc::strong_count(&before.unwrap()), 1);
    assert!(!pane.is_shown() && pane.unchanged_since().unwrap().is_none());
}

#[test]
fn what_the_program_writes_is_found_is_not_in_the_segment_and_is_gone_with_the_next_values() {
    let (segment, view) = segment();
    let pane = Pane::new(2 * PAGE).unwrap();
    for round in 0..3 {
        for at in [0, 2] {
            let _token = show(&pane, 0..2 * PAGE, &view, at * PAGE);
            let number = pane.unchanged_since().unwrap();
            assert!(number.is_some(), "round {round}");
            write(&pane, PAGE + 7, 99);
            assert_eq!(pane.unchanged_since().unwrap(), None);
            // A value that is restored was not changed.
            write(&pane, PAGE + 7, at as u8 + 2);
            assert_eq!(pane.unchanged_since().unwrap(), number);
            write(&pane, 0, 77);
            assert_eq!(segment.bytes(at * PAGE..at * PAGE + 1), [at as u8 + 1]);
        }
    }
    // The same pages again.
    let _token = show(&pane, 0..2 * PAGE, &view, 2 * PAGE);
    assert_eq!(pages(&pane), [3, 4]);
}

#[test]
fn a_pane_of_several_pieces_with_an_incomplete_last_page_is_shown_as_a_whole() {
    let (segment, view) = segment();
    let len = 2 * PAGE + 10;
    let pane = Pane::new(len).unwrap();
    let _first = show(&pane, 0..PAGE, &view, 3 * PAGE);
    assert!(!pane.is_shown());
    let _rest = show(&pane, PAGE..len, &view, 0);
    assert!(pane.is_shown() && pane.unchanged_since().unwrap().is_some());
    assert_eq!(pages(&pane), [4, 1, 2]);
    // Behind its end, the last page does not count.
    drop(segment);
    // SAFETY: the whole page is mapped.
    unsafe { ((pane.address() + len) as *mut u8).write(9) };
    assert!(pane.unchanged_since().unwrap().is_some());
    write(&pane, len - 1, 9);
    assert!(pane.unchanged_since().unwrap().is_none());
}

#[test]
fn an_owned_pane_keeps_its_values_and_does_not_follow_the_segment() {
    let (segment, view) = segment();
    let pane = Pane::new(2 * PAGE).unwrap();
    let first = show(&pane, 0..PAGE, &view, 0);
    let second = show(&pane, PAGE..2 * PAGE, &view, 0);
    write(&pane, 3, 55);
    pane.own(0..PAGE).unwrap();
    assert_eq!([first, second].map(|token| Arc::strong_count(&token)), [1, 2]);
    // SAFETY: nobody else has the segment.
    unsafe { segment.bytes_mut(0..PAGE) }.fill(200);
    assert_eq!((pane.bytes(0..1)[0], pane.bytes(3..4)[0]), (1, 55));
    assert_eq!(pane.bytes(PAGE..PAGE + 1)[0], 200, "it is shown");
    let _token = show(&pane, 0..2 * PAGE, &view, PAGE);
    assert_eq!(pages(&pane), [2, 3], "in one piece");
}

#[test]
fn what_does_not_consist_of_whole_pages_is_refused_and_changes_nothing() {
    let (_segment, view) = segment();
    let pane = Pane::new(2 * PAGE).unwrap();
    let _token = show(&pane, 0..2 * PAGE, &view, 0);
    for (range, at) in [
        (0..PAGE, 1),
        (1..PAGE, 0),
        (0..PAGE + 1, 0),
        (0..0, 0),
        (0..3 * PAGE, 0),
        (0..2 * PAGE, 3 * PAGE),
        (0..PAGE, usize::MAX - PAGE + 1),
    ] {
        let (token, mut keeper) = keeper();
        assert!(!pane.show(range, &view, at as u64, &mut keeper).unwrap());
        assert!(keeper.is_some() && Arc::strong_count(&token) == 2);
    }
    assert_eq!(pages(&pane), [1, 2]);
}

#[test]
fn a_large_pane_shows_two_parts_in_turn_and_ends_with_its_keepers() {
    const LEN: usize = 3 * TABLE;
    let segment = Segment::create("test", 2 * LEN).unwrap();
    for (value, part) in [(1, 0..LEN), (2, LEN..2 * LEN)] {
        // SAFETY: nobody else has the segment.
        unsafe { segment.bytes_mut(part) }.fill(value);
    }
    let view = Arc::new(View::new(segment.read_only().unwrap(), 2 * LEN).unwrap());
    let pane = Pane::new(LEN).unwrap();
    assert!(pane.address().is_multiple_of(TABLE));
    for version in 0..6 {
        let at = version % 2 * LEN;
        let token = show(&pane, 0..LEN, &view, at);
        let value = (version % 2) as u8 + 1;
        assert!(pane.bytes(0..LEN).iter().all(|&byte| byte == value));
        if version == 5 {
            drop(pane);
            assert_eq!(Arc::strong_count(&token), 1);
            break;
        }
    }
}
