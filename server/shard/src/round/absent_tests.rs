//! Absent ranks give the same bits as zeros, for any order of arrival.
//!
//! promise: same-bits

use std::{ops::Range, sync::Arc};

use proptest::prelude::*;
use zeroshard_kernels::Cpu;

use super::*;
use crate::{budget::Budget, instrumented::Instrumented, test_jobs::whole};

const NUMEL: usize = BLOCK + 5;

/// Numbers with zeros of both signs, whose sum depends on the order.
fn value(rank: u32, i: usize) -> f32 {
    match (i + rank as usize) % 5 {
        0 => -0.0,
        1 => 0.0,
        k => (1.0 + i as f32) * 10f32.powi((rank as i32 * 5 + k as i32) % 9 - 4),
    }
}

fn chunk(rank: u32, range: Range<usize>, of: impl Fn(usize) -> f32) -> Chunk {
    let bytes = range.clone().flat_map(|i| of(i).to_le_bytes()).collect();
    Chunk { rank, offset: range.start, dtype: DType::F32, bytes }
}

struct Sum {
    backend: Cpu,
    round: Round,
    sum: <Cpu as Backend>::Buffer,
    budget: Arc<Budget>,
}

impl Sum {
    fn new(slice: u32, world: u32) -> Self {
        let backend = Cpu::new();
        let sum = backend.allocate(DType::F32, NUMEL).unwrap();
        let round = Round::new(slice, NUMEL, &whole(NUMEL, world));
        Self { backend, round, sum, budget: Budget::new(u64::MAX) }
    }

    fn push(&mut self, chunk: &Chunk) -> u64 {
        self.round.contribute(&self.backend, &mut self.sum, chunk, &self.budget).unwrap()
    }

    fn absent(&mut self, rank: u32) -> bool {
        self.round.absent(&self.backend, &mut self.sum, rank).unwrap()
    }

    fn bits(self) -> (Vec<u8>, u64) {
        let figure = self.round.sum_of_squares().to_bits();
        (self.backend.read(&Arc::new(self.sum), 0..NUMEL, DType::F32).unwrap().to_vec(), figure)
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn absent_ranks_give_the_bits_of_zeros_in_any_order_of_arrival(
        slice in 0u32..9,
        // The number of elements that each rank sends before it is absent; a rank that sends all
        // elements is not absent.
        cuts in prop::collection::vec(prop_oneof![Just(0), Just(NUMEL), 0..NUMEL], 1..5),
        absent_first in any::<bool>(),
        order in any::<prop::sample::Index>(),
    ) {
        let world = cuts.len() as u32;
        prop_assume!(cuts.iter().any(|&cut| cut > 0));
        let mut expected = Sum::new(slice, world);
        for (rank, &cut) in (0u32..).zip(&cuts) {
            expected.push(&chunk(rank, 0..NUMEL, |i| if i < cut { value(rank, i) } else { 0.0 }));
        }
        let mut actual = Sum::new(slice, world);
        let first = order.index(world as usize) as u32;
        let ranks: Vec<u32> = (0..world).map(|i| (first + i) % world).collect();
        let absentees = |actual: &mut Sum, some: bool| {
            for &rank in &ranks {
                let cut = cuts[rank as usize];
                if cut < NUMEL && (cut == 0) == some {
                    assert!(actual.absent(rank));
                    assert!(!actual.absent(rank), "again");
                }
            }
        };
        if absent_first {
            absentees(&mut actual, true);
        }
        for &rank in &ranks {
            actual.push(&chunk(rank, 0..cuts[rank as usize], |i| value(rank, i)));
        }
        absentees(&mut actual, false);
        if !absent_first {
            absentees(&mut actual, true);
        }
        prop_assert!(actual.round.is_complete());
        prop_assert_eq!(actual.round.missing_rank(), None);
        prop_assert_eq!(actual.budget.used(), 0);
        let lowest = (0u32..).zip(&cuts).find(|(_, cut)| **cut < NUMEL).map(|(rank, _)| rank);
        prop_assert_eq!(actual.round.absentees(&[]), lowest.map(|rank| Absent { rank, everywhere: false }));
        prop_assert_eq!(actual.bits(), expected.bits());
    }
}

#[test]
fn a_slice_without_any_gradient_is_complete_and_untouched() {
    let mut sum = Sum::new(1, 3);
    for rank in [2, 0] {
        assert!(sum.absent(rank));
        assert!(!sum.round.is_complete());
    }
    assert_eq!(sum.round.missing_rank(), Some(1));
    assert!(sum.absent(1));
    assert!(sum.round.is_complete());
    assert_eq!(sum.round.absentees(&[]), Some(Absent { rank: 0, everywhere: true }));
    assert_eq!(sum.round.sum_of_squares().to_bits(), 0);
    sum.round.reset();
    assert!(!sum.round.is_complete());
    assert_eq!(sum.round.absentees(&[]), None);
}

#[test]
fn a_rank_that_is_absent_from_every_attempt_does_not_hide_another() {
    let mut sum = Sum::new(3, 4);
    for rank in [0, 2] {
        assert!(sum.absent(rank));
    }
    let lowest = |done: &[u32]| sum.round.absentees(done).map(|absent| absent.rank);
    assert_eq!((lowest(&[]), lowest(&[0]), lowest(&[0, 2])), (Some(0), Some(2), Some(0)));
}

#[test]
fn a_rank_that_sent_everything_is_not_absent_and_an_absent_rank_sends_nothing() {
    let mut sum = Sum::new(0, 2);
    sum.push(&chunk(0, 0..NUMEL, |i| value(0, i)));
    assert!(!sum.absent(0));
    assert_eq!(sum.round.absentees(&[]), None);
    assert!(sum.absent(1));
    assert_eq!(sum.push(&chunk(1, 0..NUMEL, |i| value(1, i))), 0);
    assert_eq!(sum.round.absentees(&[]), Some(Absent { rank: 1, everywhere: false }));

    let mut sum = Sum::new(0, 2);
    assert!(sum.absent(1));
    assert_eq!(sum.push(&chunk(1, 0..3, |i| value(1, i))), 0, "also while nobody has anything");
    assert!(sum.absent(0));
    assert!(sum.round.is_absent_everywhere());
}

#[test]
fn zeros_are_added_once_for_any_number_of_absent_ranks() {
    const ABSENT: u32 = 64;
    let writes = |absent_first: bool, slice: u32| {
        let backend = Instrumented::new();
        let mut round = Round::new(slice, NUMEL, &whole(NUMEL, ABSENT + 1));
        let mut sum = backend.allocate(DType::F32, NUMEL).unwrap();
        let budget = Budget::new(u64::MAX);
        let all = chunk(0, 0..NUMEL, |i| value(0, i));
        if !absent_first {
            round.contribute(&backend, &mut sum, &all, &budget).unwrap();
        }
        for rank in 1..=ABSENT {
            assert!(round.absent(&backend, &mut sum, rank).unwrap());
        }
        if absent_first {
            round.contribute(&backend, &mut sum, &all, &budget).unwrap();
        }
        assert!(round.is_complete());
        backend.writes.into_inner()
    };
    for (absent_first, slice) in [(true, 0), (false, 0), (true, 7), (false, 64)] {
        // The writes are the gradient, and zeros block by block.
        assert_eq!(writes(absent_first, slice), 1 + NUMEL.div_ceil(BLOCK), "slice {slice}");
    }
}
