//! Redistribution of a tensor from one layout to another: first the reductions, then the smallest
//! number of moves, each as large as possible.

use std::{collections::HashMap, sync::Arc};

use super::{DimPlacement, Layout, Reduction, TensorBox, list};
use crate::{Error, Result};

/// The plan that redistributes a tensor: first the reductions, in order, then the moves, in any
/// order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// Reductions along dimensions of the source mesh.
    pub reductions: Vec<Reduce>,
    /// The layout after the reductions.
    pub reduced: Layout,
    /// The moves that together give each rank its result, except for zeros. For each pair of a
    /// source box and a target box the plan contains at most one move.
    pub moves: Vec<Move>,
    /// Ranks whose part of the result is zero. For a new partial sum, one rank holds the values and
    /// the others hold zeros.
    pub zeros: Vec<u32>,
}

/// A reduction over the ranks along one dimension of the source mesh.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reduce {
    /// The dimension of the mesh.
    pub dim: usize,
    /// The operation.
    pub reduction: Reduction,
    /// The dimension of the tensor along which each rank receives its piece (a reduce-scatter), or
    /// `None` if each rank receives the whole result (an all-reduce).
    pub scatter: Option<usize>,
}

/// A box that moves from one rank to another, or stays on its rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Move {
    /// The rank that sends the box.
    pub from: u32,
    /// The rank that receives the box.
    pub to: u32,
    /// The box, relative to the whole tensor; not empty.
    pub bounds: TensorBox,
}

/// Plans the redistribution of a tensor of `shape`.
///
/// # Errors
/// [`Error::Invalid`] if a layout does not fit the shape, or if the target layout has a partial
/// placement on another mesh.
pub fn plan(shape: &[u64], from: &Layout, to: &Layout) -> Result<Plan> {
    from.check(shape, "to be moved")?;
    to.check(shape, "to be moved")?;
    let same_mesh = from.mesh() == to.mesh();
    let mut reductions = Vec::new();
    let mut placements = from.placements().to_vec();
    for (dim, placement) in from.placements().iter().enumerate() {
        let &DimPlacement::Partial(reduction) = placement else { continue };
        let wanted = same_mesh.then(|| to.placements()[dim]);
        if wanted == Some(*placement) {
            continue;
        }
        // If another mesh dimension shards the same tensor dimension, scattering would split pieces
        // again.
        let scatter = match wanted {
            Some(DimPlacement::Shard(cut))
                if !from.placements().contains(&DimPlacement::Shard(cut)) =>
            {
                Some(cut)
            }
            _ => None,
        };
        placements[dim] = scatter.map_or(DimPlacement::Replicate, DimPlacement::Shard);
        reductions.push(Reduce { dim, reduction, scatter });
    }
    // If two reductions scatter the same dimension, the later one would split first.
    for index in 1..reductions.len() {
        let cut = reductions[index].scatter;
        if cut.is_some() && reductions[..index].iter().any(|earlier| earlier.scatter == cut) {
            reductions[index].scatter = None;
            placements[reductions[index].dim] = DimPlacement::Replicate;
        }
    }
    let reduced = Layout::new(Arc::clone(from.mesh()), placements)?;
    let kept = kept(&reduced, to, same_mesh)?;
    let (moves, zeros) = moves(shape, &reduced, to, &kept);
    Ok(Plan { reductions, reduced, moves, zeros })
}

/// The mesh dimensions along which the result stays partial.
fn kept(reduced: &Layout, to: &Layout, same_mesh: bool) -> Result<Vec<usize>> {
    let partial = |placement: &DimPlacement| matches!(placement, DimPlacement::Partial(_));
    if !same_mesh {
        let to_sum = to.placements().iter().any(partial);
        return if to_sum {
            Err(Error::refused(format!(
                "a tensor cannot get the placements {} on another mesh; use Shard and Replicate",
                list(to.placements())
            )))
        } else {
            Ok(Vec::new())
        };
    }
    let dims = 0..reduced.placements().len();
    Ok(dims.filter(|&dim| partial(&reduced.placements()[dim])).collect())
}

fn moves(shape: &[u64], reduced: &Layout, to: &Layout, kept: &[usize]) -> (Vec<Move>, Vec<u32>) {
    let coordinate =
        |layout: &Layout, rank| layout.mesh().coordinate(rank).expect("it is one of the mesh's");
    // The ranks that hold each box, in mesh order. The boxes are equal or disjoint.
    let mut holders: Vec<(TensorBox, Vec<u32>)> = Vec::new();
    for &rank in reduced.mesh().ranks() {
        let bounds = reduced.local_box(shape, rank).expect("it is one of the mesh's");
        match holders.iter_mut().find(|(other, _)| *other == bounds) {
            _ if bounds.is_empty() => {}
            Some((_, ranks)) => ranks.push(rank),
            None => holders.push((bounds, vec![rank])),
        }
    }
    let (mut moves, mut zeros) = (Vec::new(), Vec::new());
    let mut sent: HashMap<u32, u64> = HashMap::new();
    for &rank in to.mesh().ranks() {
        let place = coordinate(to, rank);
        let new_sum = |dim: usize| {
            to.placements()[dim] == DimPlacement::Partial(Reduction::Sum)
                && !kept.contains(&dim)
                && place[dim] > 0
        };
        if (0..place.len()).any(new_sum) {
            zeros.push(rank);
            continue;
        }
        let wanted = to.local_box(shape, rank).expect("it is one of the mesh's");
        for (bounds, ranks) in &holders {
            let Some(bounds) = bounds.intersection(&wanted) else { continue };
            let may = |other: u32| {
                let other = coordinate(reduced, other);
                kept.iter().all(|&dim| other[dim] == place[dim])
            };
            let ranks = ranks.iter().copied().filter(|&other| may(other));
            // A rank that holds the box keeps it; otherwise the holder that has sent the least so
            // far sends it.
            let from =
                ranks.min_by_key(|other| (*other != rank, sent.get(other).copied().unwrap_or(0)));
            let from = from.expect("each coordinate of the kept dimensions holds the whole tensor");
            if from != rank {
                *sent.entry(from).or_default() += bounds.numel();
            }
            moves.push(Move { from, to: rank, bounds });
        }
    }
    (moves, zeros)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::{
        StridedBox,
        layout::tests::{layouts, on},
    };
    use super::*;
    use DimPlacement::{Partial, Replicate, Shard};

    /// The elements of each rank's box, row-major.
    type Local = HashMap<u32, Vec<f64>>;

    fn boxed(shape: &[u64], bounds: &TensorBox, whole: &[f64]) -> Vec<f64> {
        let strided = StridedBox::new(shape, bounds.clone());
        strided.runs(0..strided.numel()).flat_map(|(_, run)| whole[run].to_vec()).collect()
    }

    /// The local tensors of a layout for the logical tensor `whole`; partial sums are
    /// rank-dependent parts.
    fn scatter(shape: &[u64], layout: &Layout, whole: &[f64]) -> Local {
        let mesh = layout.mesh();
        let local = |&rank: &u32| {
            let place = mesh.coordinate(rank).unwrap();
            let mut values = boxed(shape, &layout.local_box(shape, rank).unwrap(), whole);
            for (dim, placement) in layout.placements().iter().enumerate() {
                let n = mesh.shape()[dim] as f64;
                for value in &mut values {
                    match placement {
                        // The first rank holds the rest.
                        Partial(Reduction::Sum) if place[dim] > 0 => *value *= 0.25,
                        Partial(Reduction::Sum) => *value *= 1.0 - 0.25 * (n - 1.0),
                        Partial(Reduction::Avg) if place[dim] > 0 => *value *= 0.5,
                        Partial(Reduction::Avg) => *value *= n - 0.5 * (n - 1.0),
                        _ => {}
                    }
                }
            }
            (rank, values)
        };
        mesh.ranks().iter().map(local).collect()
    }

    fn gather(shape: &[u64], layout: &Layout, locals: &Local) -> Vec<f64> {
        let mesh = layout.mesh();
        let mut whole = vec![0.0; shape.iter().product::<u64>() as usize];
        for &rank in mesh.ranks() {
            let place = mesh.coordinate(rank).unwrap();
            let mut weight = 1.0;
            for (dim, placement) in layout.placements().iter().enumerate() {
                weight *= match placement {
                    Replicate if place[dim] > 0 => 0.0,
                    Partial(Reduction::Avg) => 1.0 / mesh.shape()[dim] as f64,
                    _ => 1.0,
                };
            }
            let strided = StridedBox::new(shape, layout.local_box(shape, rank).unwrap());
            for (first, run) in strided.runs(0..strided.numel()) {
                for (number, position) in (first..).zip(run) {
                    whole[position] += weight * locals[&rank][number];
                }
            }
        }
        whole
    }

    fn carry_out(shape: &[u64], plan: &Plan, from: &Layout, to: &Layout, locals: &Local) -> Local {
        // A reduction gives, by definition, the local tensors of the reduced layout for the same
        // logical tensor, along the dimensions that stay partial.
        let mut placements = from.placements().to_vec();
        let mut locals = locals.clone();
        for reduce in &plan.reductions {
            let before = Layout::new(from.mesh().clone(), placements.clone()).unwrap();
            placements[reduce.dim] = reduce.scatter.map_or(Replicate, Shard);
            let after = Layout::new(from.mesh().clone(), placements.clone()).unwrap();
            let mut reduced = Local::new();
            for &rank in from.mesh().ranks() {
                let group = from.mesh().group(rank, reduce.dim).unwrap();
                let bounds = before.local_box(shape, rank).unwrap();
                let piece = after.local_box(shape, rank).unwrap();
                let inner = StridedBox::new(&bounds.size, piece.within(&bounds));
                let n = if reduce.reduction == Reduction::Avg { group.len() as f64 } else { 1.0 };
                let value =
                    |at: usize| group.iter().map(|other| locals[other][at]).sum::<f64>() / n;
                let values = inner.runs(0..inner.numel()).flat_map(|(_, run)| run).map(value);
                reduced.insert(rank, values.collect());
            }
            locals = reduced;
        }
        let mut result = Local::new();
        for &rank in to.mesh().ranks() {
            let wanted = to.local_box(shape, rank).unwrap();
            let zero = plan.zeros.contains(&rank);
            let mut values = vec![if zero { 0.0 } else { f64::NAN }; wanted.numel() as usize];
            for step in plan.moves.iter().filter(|step| step.to == rank) {
                let held = plan.reduced.local_box(shape, step.from).unwrap();
                let source = StridedBox::new(&held.size, step.bounds.within(&held));
                let target = StridedBox::new(&wanted.size, step.bounds.within(&wanted));
                let source: Vec<usize> =
                    source.runs(0..source.numel()).flat_map(|(_, run)| run).collect();
                let target = target.runs(0..target.numel()).flat_map(|(_, run)| run);
                for (to, from) in target.zip(source) {
                    assert!(values[to].is_nan(), "moved twice");
                    values[to] = locals[&step.from][from];
                }
            }
            assert!(!values.iter().any(|value| value.is_nan()), "never moved");
            result.insert(rank, values);
        }
        result
    }

    proptest! {
        #[test]
        fn a_plan_redistributes_every_layout_to_every_other(
            (from, to) in prop_oneof![
                (layouts(vec![3]), layouts(vec![3])),
                (layouts(vec![2, 2]), layouts(vec![2, 2])),
                (layouts(vec![2, 3]), layouts(vec![2, 3])),
            ],
            shape in [0u64..7, 0u64..7],
        ) {
            let whole: Vec<f64> = (0..shape[0] * shape[1]).map(|i| 1.0 + i as f64).collect();
            let locals = scatter(&shape, &from, &whole);
            let plan = plan(&shape, &from, &to).unwrap();
            let result = carry_out(&shape, &plan, &from, &to, &locals);
            for (actual, expected) in gather(&shape, &to, &result).iter().zip(&whole) {
                prop_assert!((actual - expected).abs() < 1e-9, "{} and not {}", actual, expected);
            }
        }
    }

    #[test]
    fn elements_that_a_rank_already_holds_do_not_move() {
        let plan = plan(&[4, 4], &on(&[2], &[Replicate]), &on(&[2], &[Shard(1)])).unwrap();
        assert!(plan.reductions.is_empty() && plan.moves.iter().all(|step| step.from == step.to));
    }

    #[test]
    fn a_gather_is_one_move_per_pair_of_ranks_with_alternating_senders() {
        let gather = plan(&[6, 4], &on(&[3], &[Shard(0)]), &on(&[3], &[Replicate])).unwrap();
        assert_eq!(gather.moves.iter().filter(|step| step.from != step.to).count(), 6);
        // Two ranks hold each half, and each of them sends one box.
        let mesh = [2, 2];
        let turned =
            plan(&[4, 4], &on(&mesh, &[Shard(0), Replicate]), &on(&mesh, &[Replicate, Replicate]))
                .unwrap();
        let mut senders: Vec<u32> =
            turned.moves.iter().filter(|s| s.from != s.to).map(|s| s.from).collect();
        senders.sort_unstable();
        assert_eq!(senders, [0, 1, 2, 3]);
    }

    #[test]
    fn a_sum_is_scattered_if_the_target_is_sharded() {
        let sum = Partial(Reduction::Sum);
        let scattered = plan(&[4, 4], &on(&[2], &[sum]), &on(&[2], &[Shard(1)])).unwrap();
        assert_eq!(
            scattered.reductions,
            [Reduce { dim: 0, reduction: Reduction::Sum, scatter: Some(1) }]
        );
        assert!(scattered.moves.iter().all(|step| step.from == step.to));
        let summed = plan(&[4, 4], &on(&[2], &[sum]), &on(&[2], &[Replicate])).unwrap();
        assert_eq!(
            summed.reductions,
            [Reduce { dim: 0, reduction: Reduction::Sum, scatter: None }]
        );
    }

    #[test]
    fn a_sum_on_another_mesh_is_refused() {
        let (from, to) = (on(&[2], &[Replicate]), on(&[3], &[Partial(Reduction::Sum)]));
        assert!(plan(&[4, 4], &from, &to).is_err());
        assert!(plan(&[4, 4], &from, &on(&[3], &[Shard(2)])).is_err());
    }
}
