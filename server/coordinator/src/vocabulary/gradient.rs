//! The reduced gradient of a step according to the servers' reports.

use std::{collections::BTreeMap, sync::Arc};

use zeroshard_model::{JobSpec, Result, TensorSpec};

use crate::vocabulary::ids::ServerId;

/// Checks that a server reports exactly its trained slices, and names ranks below `world`.
pub(crate) fn check_report(
    report: &Reduced,
    expected: Option<&Vec<u32>>,
    world: u32,
) -> Result<(), String> {
    let expected = expected.map_or(&[][..], Vec::as_slice);
    // The list is ascending: a server may have 100,000 slices.
    let is_own = |slice: u32| expected.binary_search(&slice).is_ok();
    if !report.sums.iter().map(|(slice, _)| slice).eq(expected) {
        let (slices, own) = (report.sums.len(), expected.len());
        return Err(format!(
            "gradients of {slices} slices, but holds {own} slices that are trained"
        ));
    }
    if let Some(absent) = report.absent.iter().find(|absent| !is_own(absent.slice)) {
        return Err(format!("absent ranks for slice {}, which it does not hold", absent.slice));
    }
    if let Some(largest) = report.largest.iter().find(|largest| !is_own(largest.slice)) {
        return Err(format!("a contribution to slice {}, which it does not hold", largest.slice));
    }
    if let Some(Largest { rank, .. }) = report.largest.iter().find(|of| of.rank >= world) {
        return Err(format!("a contribution of rank {rank}, although there are {world} ranks"));
    }
    match report.overflow {
        Some(overflow) if !is_own(overflow.slice) => {
            Err(format!("an overflow in slice {}, which it does not hold", overflow.slice))
        }
        _ => Ok(()),
    }
}

/// The reduced gradient of one server's slices.
#[derive(Debug, Clone)]
pub struct Reduced {
    /// All trained slices, ascending, with the sum of squares of their summed gradient.
    pub sums: Vec<(u32, f64)>,
    /// The first overflow in manifest order.
    pub overflow: Option<Overflow>,
    /// The slices from which at least one rank is absent, ascending.
    pub absent: Vec<Absent>,
    /// The largest contribution to each slice to which a rank has contributed, ascending by slice.
    pub largest: Vec<Largest>,
    /// The number of the last command to copy slices that the server had received; 0: none.
    pub copies: u64,
}

/// The contribution with the largest norm to a slice.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Largest {
    pub slice: u32,
    /// The rank that pushed it; in a group, that of the share.
    pub rank: u32,
    /// The sum of squares of its elements.
    pub squares: f64,
}

/// A gradient that contains inf or NaN.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Overflow {
    pub slice: u32,
    /// The lowest rank whose gradient contains them; `None` if only the sum over the ranks does.
    pub rank: Option<u32>,
}

impl Overflow {
    /// Names the tensor and the rank, as a part of a sentence.
    pub(crate) fn describe(self, spec: &JobSpec) -> String {
        let tensor = &spec.manifest.tensor_of(self.slice as usize).name;
        let sum = || "the sum over the ranks".to_owned();
        let by = self.rank.map_or_else(sum, |rank| spec.describe_rank(rank));
        format!("inf or NaN in tensor {tensor:?}, from {by}")
    }
}

/// A slice, or a tensor with this first slice, from which at least one rank is absent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Absent {
    pub slice: u32,
    /// The lowest absent rank; one that takes part in the step, if there is one.
    pub rank: u32,
    /// `true` if all ranks are absent.
    pub everywhere: bool,
}

/// The L2 norm of the mean, unscaled gradient before factors and clipping.
#[derive(Debug, Clone, PartialEq)]
pub struct Norm {
    /// The norm of all tensors that are clipped; not finite after an overflow.
    pub value: f64,
    /// The first overflow in manifest order.
    pub overflow: Option<Overflow>,
    /// The norm of each tensor; 0 for a tensor without gradient.
    pub tensors: Arc<[f64]>,
}

/// The reduced gradient of all slices.
#[derive(Debug)]
pub(crate) struct Gradient {
    /// The sum of squares of the mean gradient of each tensor; 0 for a tensor that does not train.
    sums: Vec<f64>,
    /// The first overflow in manifest order.
    overflow: Option<Overflow>,
    /// One entry for each tensor with absent ranks, in manifest order.
    pub(crate) absent: Vec<Absent>,
}

impl Gradient {
    /// Adds the sums in f64: slices to tensors, and tensors to the total, in manifest order, so
    /// that the result does not depend on the distribution of slices over the servers.
    /// `contributes`: whether a rank takes part in the step.
    pub(crate) fn new(
        spec: &JobSpec,
        reports: &BTreeMap<ServerId, Reduced>,
        contributes: impl Fn(u32) -> bool,
    ) -> Self {
        let manifest = &spec.manifest;
        let mut sums = vec![0.0f64; manifest.slices().len()];
        for &(slice, sum) in reports.values().flat_map(|report| &report.sums) {
            sums[slice as usize] = sum;
        }
        let of_tensor = |(tensor, spec_of): (usize, &TensorSpec)| {
            if !spec_of.trains() {
                return 0.0;
            }
            let sum = sums[manifest.slices_of(tensor)].iter().fold(0.0, |a, b| a + b);
            let divisor = spec.divisor(tensor) as f64;
            sum / (divisor * divisor)
        };
        let tensors = manifest.tensors().iter().enumerate().map(of_tensor).collect();
        let infinite = sums.iter().position(|sum| !sum.is_finite());
        let infinite = infinite.map(|slice| Overflow { slice: slice as u32, rank: None });
        // The servers' reports have precedence, because they may name the rank.
        let overflows = reports.values().filter_map(|report| report.overflow).chain(infinite);
        Self {
            sums: tensors,
            overflow: overflows.min_by_key(|overflow| overflow.slice),
            absent: absent(spec, reports, contributes),
        }
    }

    /// The norm of the mean gradient of all tensors that are clipped, each multiplied by its
    /// factor.
    pub(crate) fn norm_of(&self, spec: &JobSpec, factors: &[f64]) -> f64 {
        let clipped = spec.manifest.tensors().iter().enumerate().filter(|(_, t)| !t.no_clip);
        let squares = clipped.map(|(tensor, _)| {
            let factor = factors.get(tensor).copied().unwrap_or(1.0);
            self.sums[tensor] * (factor * factor)
        });
        squares.fold(0.0, |a, b| a + b).sqrt()
    }

    /// The norm of the mean, unscaled gradient.
    pub(crate) fn norm(&self, spec: &JobSpec, loss_scale: f64) -> Norm {
        let (norm, overflow) = (self.norm_of(spec, &[]) / loss_scale, self.overflow);
        // If a rank's gradients overflow, they may still add up to a finite norm, which is
        // meaningless.
        let value = if overflow.is_some() && norm.is_finite() { f64::NAN } else { norm };
        let tensors = self.sums.iter().map(|sum| sum.sqrt() / loss_scale).collect();
        Norm { value, overflow, tensors }
    }
}

/// For each tensor of which at least one rank lacked a part: the lowest such rank, if possible of
/// those that take part in the step, and whether no rank had any of it.
pub(crate) fn absent(
    spec: &JobSpec,
    reports: &BTreeMap<ServerId, Reduced>,
    contributes: impl Fn(u32) -> bool,
) -> Vec<Absent> {
    let order = |rank: u32| (!contributes(rank), rank);
    // By tensor: the lowest rank, and the number of slices without any gradient.
    let mut tensors = BTreeMap::<usize, (u32, usize)>::new();
    for absent in reports.values().flat_map(|report| &report.absent) {
        let tensor = spec.manifest.slices()[absent.slice as usize].tensor;
        let (rank, nowhere) = tensors.entry(tensor).or_insert((absent.rank, 0));
        *rank = std::cmp::min_by_key(absent.rank, *rank, |&rank| order(rank));
        *nowhere += usize::from(absent.everywhere);
    }
    let merged = tensors.into_iter().map(|(tensor, (rank, nowhere))| {
        let slices = spec.manifest.slices_of(tensor);
        Absent { slice: slices.start as u32, rank, everywhere: nowhere == slices.len() }
    });
    merged.collect()
}
