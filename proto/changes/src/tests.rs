//! Encodes, decodes, merges, applies and damages changes of random values.

use std::collections::HashMap;

use proptest::prelude::*;
use zeroshard_loops::Level;
use zeroshard_model::DType;

use crate::{
    Blocks, Recorder,
    apply::{self, Effect, Place, apply, undo},
    block::{BLOCK, Block, most_bytes, unchanged},
    hash, merge,
};

/// The values of a slice as little-endian bytes.
type Values = Vec<u8>;

fn recorded(dtype: DType, before: &[u8], after: &[u8]) -> crate::Recorded {
    let numel = before.len() / dtype.size();
    let mut recorder = Recorder::new(Level::best(), dtype, 1_000, numel);
    // In tiles like a step, and at the end more elements than the slice has.
    let piece = 128 * dtype.size();
    before.chunks(piece).zip(after.chunks(piece)).for_each(|(b, a)| recorder.compare(b, a));
    recorder.compare(&[1; 8], &[2; 8]);
    recorder.finish().unwrap()
}

fn place(dtype: DType) -> Place {
    Place { dtype, first: 1_000 }
}

/// Moves some of the elements by a few units, or to any value.
fn stepped(random: &mut fastrand::Rng, dtype: DType, values: &[u8], density: f64) -> Values {
    let mut after = values.to_vec();
    for value in after.chunks_exact_mut(dtype.size()) {
        if random.f64() >= density {
            continue;
        }
        match random.u32(..10) {
            0 => value.iter_mut().for_each(|byte| *byte = random.u8(..)),
            _ => value[0] = value[0].wrapping_add(random.u8(..)),
        }
    }
    after
}

fn random_values(random: &mut fastrand::Rng, dtype: DType, numel: usize) -> Values {
    (0..numel * dtype.size()).map(|_| random.u8(..)).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn a_change_takes_the_old_values_to_the_new_ones(
        seed: u64,
        numel in prop_oneof![Just(0), 1usize..300, Just(BLOCK), BLOCK - 2..2 * BLOCK + 300],
        dtype in prop_oneof![Just(DType::F32), Just(DType::Bf16), Just(DType::F16)],
        density in prop_oneof![Just(0.0), Just(1.0), 0.0..0.05, 0.0..1.0],
    ) {
        let mut random = fastrand::Rng::with_seed(seed);
        let before = random_values(&mut random, dtype, numel);
        let after = stepped(&mut random, dtype, &before, density);
        let recorded = recorded(dtype, &before, &after);
        prop_assert!(recorded.change.len() <= most_bytes(dtype, numel));
        let [old, new] = [&before, &after].map(|values| hash::of(dtype, 1_000, values));
        prop_assert_eq!(old.wrapping_add(recorded.hash_difference), new);
        let mut values = before.clone();
        prop_assert_eq!(
            apply(place(dtype), &mut values, &recorded.change).unwrap(),
            Effect { difference: recorded.hash_difference, changed: recorded.changed }
        );
        prop_assert_eq!(&values, &after);
        undo(dtype, &mut values, &recorded.change);
        prop_assert_eq!(&values, &before);

        // The same with only the changed elements.
        let positions = apply::positions(dtype, numel, &recorded.change).unwrap();
        prop_assert_eq!(positions.len() as u64, recorded.changed);
        let of = |values: &[u8], at: u64| {
            values[at as usize * dtype.size()..][..dtype.size()].to_vec()
        };
        let gather = |values| positions.iter().flat_map(|&at| of(values, at)).collect::<Values>();
        let mut gathered = gather(&before);
        let effect =
            apply::apply_gathered(place(dtype), numel, &mut gathered, &recorded.change).unwrap();
        prop_assert_eq!(gathered, gather(&after));
        prop_assert_eq!(effect.difference, recorded.hash_difference);
        prop_assert_eq!(effect.changed, recorded.changed);
    }

    #[test]
    fn merged_changes_are_the_change_between_the_first_and_the_last_version(
        seed: u64,
        numel in 1usize..BLOCK + 500,
        dtype in prop_oneof![Just(DType::F32), Just(DType::Bf16), Just(DType::F16)],
        densities in prop::collection::vec(prop_oneof![Just(0.0), 0.0..0.3, Just(1.0)], 1..6),
    ) {
        let mut random = fastrand::Rng::with_seed(seed);
        let first = random_values(&mut random, dtype, numel);
        let (mut last, mut changes) = (first.clone(), Vec::new());
        for density in densities {
            let next = stepped(&mut random, dtype, &last, density);
            changes.push(recorded(dtype, &last, &next).change);
            last = next;
        }
        // The change back to the first version cancels all others.
        let back = recorded(dtype, &last, &first).change;
        let mut references: Vec<&[u8]> = changes.iter().map(Vec::as_slice).collect();
        let all = merge(dtype, numel, &references).unwrap();
        prop_assert_eq!(&all, &recorded(dtype, &first, &last).change);
        references.push(&back);
        prop_assert_eq!(merge(dtype, numel, &references).unwrap(), unchanged(numel));
    }

    #[test]
    fn damaged_changes_are_refused_or_decoded_within_the_slice(
        seed: u64,
        numel in 1usize..BLOCK + 500,
        dtype in prop_oneof![Just(DType::F32), Just(DType::Bf16), Just(DType::F16)],
        damages in 1usize..6,
        cut in prop::option::of(0.0..1.0f64),
    ) {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut values = random_values(&mut random, dtype, numel);
        let after = stepped(&mut random, dtype, &values, 0.02);
        let mut change = recorded(dtype, &values, &after).change;
        for _ in 0..damages {
            let at = random.usize(..change.len());
            change[at] = random.u8(..);
        }
        cut.into_iter().for_each(|cut| change.truncate((cut * change.len() as f64) as usize));
        let before = values.clone();
        let applied = apply(place(dtype), &mut values, &change);
        prop_assert_eq!(applied.is_ok(), merge(dtype, numel, &[&change]).is_ok());
        undo(dtype, &mut values, &change);
        prop_assert_eq!(values, before);
    }

    #[test]
    fn any_bytes_are_refused_or_decoded_within_the_slice(
        change in prop::collection::vec(any::<u8>(), 0..400),
        numel in 0usize..BLOCK + 100,
        wide: bool,
    ) {
        let dtype = if wide { DType::F32 } else { DType::F16 };
        let mut blocks = Blocks::new(dtype, numel, &change);
        let mut block = Block::default();
        while let Ok(true) = blocks.next(&mut block) {
            let len = BLOCK.min(numel - block.start);
            prop_assert!(block.positions.iter().all(|&at| usize::from(at) < len));
            prop_assert!(block.positions.is_sorted() && !block.differences.contains(&0));
        }
    }
}

#[test]
fn values_that_somebody_else_has_written_have_another_hash() {
    let mut random = fastrand::Rng::with_seed(7);
    let before = random_values(&mut random, DType::Bf16, 5_000);
    let after = stepped(&mut random, DType::Bf16, &before, 0.1);
    let recorded = recorded(DType::Bf16, &before, &after);
    let mut written = before.clone();
    let changed = before.iter().zip(&after).position(|(before, after)| before != after).unwrap();
    written[changed] ^= 1;
    let effect = apply(place(DType::Bf16), &mut written, &recorded.change).unwrap();
    assert_ne!(effect.difference, recorded.hash_difference);
}

#[test]
fn a_slice_that_was_not_seen_whole_has_no_change() {
    let mut recorder = Recorder::new(Level::best(), DType::F32, 0, 3);
    recorder.compare(&[0; 8], &[1; 8]);
    assert_eq!((recorder.missing(), recorder.finish()), (1, None));
}

/// Returns the number of bits per changed element, and the entropy of (changed, sign, magnitude)
/// per changed element.
fn bits_and_entropy(density: f64, one_unit: f64) -> (f64, f64) {
    const NUMEL: usize = 1 << 20;
    let mut random = fastrand::Rng::with_seed((density * 1e6) as u64);
    let before = vec![0x80; 2 * NUMEL];
    let mut after = before.clone();
    let mut counts = HashMap::<i32, f64>::new();
    for value in after.chunks_exact_mut(2) {
        if random.f64() >= density {
            continue;
        }
        let mut units = 1;
        while units > 1 && random.f64() < 0.5 || units == 1 && random.f64() > one_unit {
            units += 1;
        }
        let units = if random.bool() { units } else { -units };
        *counts.entry(units).or_default() += 1.0;
        let moved = i32::from(u16::from_le_bytes([value[0], value[1]])) - units;
        value.copy_from_slice(&(moved as u16).to_le_bytes());
    }
    let changes: f64 = counts.values().sum();
    counts.insert(0, NUMEL as f64 - changes);
    let entropy: f64 = counts.values().map(|count| count * (NUMEL as f64 / count).log2()).sum();
    let recorded = recorded(DType::Bf16, &before, &after);
    assert_eq!(recorded.changed as f64, changes);
    (8.0 * recorded.change.len() as f64 / changes, entropy / changes)
}

#[test]
fn changes_take_at_most_a_third_more_than_their_entropy() {
    // As measured in a small bf16 transformer at learning rates from 1e-6 to 1e-4.
    for (density, one_unit) in
        [(0.002, 0.9), (0.009, 0.9), (0.024, 0.9), (0.06, 0.85), (0.26, 0.77), (0.72, 0.5)]
    {
        let (bits, entropy) = bits_and_entropy(density, one_unit);
        println!(
            "{:5.1}% changed: {bits:.2} bits for each change, entropy {entropy:.2}, ratio {:.3}",
            100.0 * density,
            bits / entropy
        );
        assert!(bits <= 1.3 * entropy, "{density}: {bits} bits, entropy {entropy}");
    }
}
