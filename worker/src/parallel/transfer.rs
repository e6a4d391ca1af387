//! Executes the redistribution of a tensor from one layout to another, on one rank.

use std::sync::Arc;

use zeroshard_model::{
    DimPlacement, Layout, StridedBox, TensorBox,
    geometry::redistribute::{self, Plan, Reduce},
};

use super::error::Result;
use super::world::World;

/// The redistribution of a tensor from one layout to another.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Transfer {
    /// The shape of the whole tensor.
    pub(crate) shape: Vec<u64>,
    pub(crate) from: Layout,
    pub(crate) to: Layout,
}

impl Transfer {
    /// Returns whether both layouts are the same.
    pub(crate) fn is_identity(&self) -> bool {
        self.from == self.to
    }

    /// The shape of the part that `rank` holds afterwards.
    pub(crate) fn size(&self, rank: u32) -> Vec<usize> {
        bounds(&self.to, &self.shape, rank).size.iter().map(|&size| size as usize).collect()
    }

    /// Executes the redistribution together with the other ranks. `data` is the part of this rank,
    /// row-major.
    ///
    /// # Errors
    /// Those of [`redistribute::plan`] and of the collectives.
    pub(crate) fn run(&self, world: &World, data: Vec<f32>) -> Result<Vec<f32>> {
        if self.is_identity() {
            return Ok(data);
        }
        let plan = redistribute::plan(&self.shape, &self.from, &self.to)?;
        let data = self.reduce(world, &plan, data)?;
        self.exchange(world, &plan, data)
    }

    /// Executes the reductions of the plan.
    fn reduce(&self, world: &World, plan: &Plan, mut data: Vec<f32>) -> Result<Vec<f32>> {
        let mesh = self.from.mesh();
        let mut layout = self.from.clone();
        for &Reduce { dim, reduction, scatter } in &plan.reductions {
            let Some(group) = mesh.group(world.rank(), dim) else { continue };
            let mut placements = layout.placements().to_vec();
            placements[dim] = scatter.map_or(DimPlacement::Replicate, DimPlacement::Shard);
            let after = Layout::new(Arc::clone(mesh), placements)?;
            data = if scatter.is_some() {
                let held = bounds(&layout, &self.shape, world.rank());
                let part = |&rank: &u32| cut(&data, &held, &bounds(&after, &self.shape, rank));
                let own = group.iter().position(|&rank| rank == world.rank()).unwrap_or_default();
                world.reduce_scatter(&group, reduction, group.iter().map(part).collect(), own)?
            } else {
                world.all_reduce(&group, reduction, data)?
            };
            layout = after;
        }
        Ok(data)
    }

    /// Executes the moves of the plan.
    fn exchange(&self, world: &World, plan: &Plan, data: Vec<f32>) -> Result<Vec<f32>> {
        let (rank, reduced) = (world.rank(), &plan.reduced);
        let held = bounds(reduced, &self.shape, rank);
        let wanted = bounds(&self.to, &self.shape, rank);
        if plan.zeros.is_empty() && plan.moves.iter().all(|step| step.from == step.to) {
            return Ok(if held == wanted { data } else { cut(&data, &held, &wanted) });
        }
        let mut result = vec![0.0; wanted.numel() as usize];
        if let Some(dim) = self.gathered(reduced).filter(|_| plan.zeros.is_empty()) {
            let group = reduced.mesh().group(rank, dim).unwrap_or_default();
            let boxes: Vec<TensorBox> =
                group.iter().map(|&rank| bounds(reduced, &self.shape, rank)).collect();
            let sizes: Vec<usize> = boxes.iter().map(|bounds| bounds.numel() as usize).collect();
            let parts = world.all_gather(&group, &sizes, data)?;
            for (part, bounds) in parts.iter().zip(&boxes) {
                paste(&mut result, &wanted, part, bounds);
            }
            return Ok(result);
        }
        for step in plan.moves.iter().filter(|step| step.from == rank && step.to != rank) {
            world.send(step.to, cut(&data, &held, &step.bounds))?;
        }
        for step in plan.moves.iter().filter(|step| step.to == rank) {
            let part = if step.from == rank {
                cut(&data, &held, &step.bounds)
            } else {
                world.recv(step.from, step.bounds.numel() as usize)?
            };
            paste(&mut result, &wanted, &part, &step.bounds);
        }
        Ok(result)
    }

    /// The mesh dimension along which the parts are gathered, if one all-gather is sufficient.
    fn gathered(&self, reduced: &Layout) -> Option<usize> {
        if reduced.mesh() != self.to.mesh() {
            return None;
        }
        let pairs = || reduced.placements().iter().zip(self.to.placements()).enumerate();
        let mut differing = pairs().filter(|(_, (from, to))| from != to);
        let Some((dim, (cut @ DimPlacement::Shard(_), DimPlacement::Replicate))) = differing.next()
        else {
            return None;
        };
        // If another mesh dimension shards the same tensor dimension, the gathered parts are not
        // consecutive in the result.
        let alone = pairs().all(|(other, (from, _))| other == dim || from != cut);
        (alone && differing.next().is_none()).then_some(dim)
    }
}

/// The box of `rank`; empty for a rank that is not in the mesh.
fn bounds(layout: &Layout, shape: &[u64], rank: u32) -> TensorBox {
    layout
        .local_box(shape, rank)
        .unwrap_or_else(|| TensorBox { offset: vec![0; shape.len()], size: vec![0; shape.len()] })
}

/// Copies the elements of the box `inner` out of `data`, the elements of the box `outer`.
pub(crate) fn cut(data: &[f32], outer: &TensorBox, inner: &TensorBox) -> Vec<f32> {
    if inner.is_empty() {
        return Vec::new();
    }
    let strided = StridedBox::new(&outer.size, inner.within(outer));
    strided.runs(0..strided.numel()).flat_map(|(_, run)| &data[run]).copied().collect()
}

/// Copies `part`, the elements of the box `inner`, into `data`, the elements of the box `outer`.
fn paste(data: &mut [f32], outer: &TensorBox, part: &[f32], inner: &TensorBox) {
    if inner.is_empty() {
        return;
    }
    let strided = StridedBox::new(&outer.size, inner.within(outer));
    for (first, run) in strided.runs(0..strided.numel()) {
        data[run.clone()].copy_from_slice(&part[first..first + run.len()]);
    }
}
