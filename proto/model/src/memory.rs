//! The memory that a job needs on shard servers.
//!
//! The coordinator admits and places jobs by it, and shard servers distribute arrays over their
//! tiers by it, so that both have the same numbers.

use std::ops::{Add, AddAssign};

use crate::{
    DType, JobSpec, Optimizer, StateDType, TensorSpec,
    average::AVERAGE_PARTS,
    manifest::{number_of_slices, slice_numel},
    optimizer::Code,
};

/// The arrays of a slice on one server, in bytes.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Arrays {
    /// The f32 master weights; of a tensor that is not trained, its parameters if they are f32.
    pub master: u64,
    /// The f32 sum of the gradients.
    pub sum: u64,
    /// The state tensors of the optimizer, in their order, then those of the averages.
    pub state: Vec<u64>,
    /// The parameters in another dtype than f32: a copy of the master weights, or all that a
    /// server has of a tensor that is not trained.
    pub published: u64,
    /// `true` if a step needs all arrays at once, in the memory of the device that computes.
    pub is_whole: bool,
}

impl Arrays {
    /// The arrays of `numel` consecutive elements of a tensor of a job, whose parameter group has
    /// this optimizer.
    fn of(tensor: &TensorSpec, optimizer: Option<&Optimizer>, job: &JobSpec, numel: usize) -> Self {
        let bytes = |dtype: DType| numel as u64 * dtype.size() as u64;
        let published = if tensor.dtype == DType::F32 { 0 } else { bytes(tensor.dtype) };
        let Some(optimizer) = optimizer.filter(|_| tensor.trains()) else {
            let master = if tensor.dtype == DType::F32 { bytes(DType::F32) } else { 0 };
            return Self { master, published, ..Self::default() };
        };
        let state = optimizer.state_shapes(&tensor.shape).into_iter();
        let state = state.map(|shape| job.state_dtype.bytes(shape.numel(numel)) as u64);
        let averages = std::iter::repeat_n(bytes(DType::F32), AVERAGE_PARTS * job.averages.len());
        Self {
            master: bytes(DType::F32),
            sum: bytes(DType::F32),
            state: state.chain(averages).collect(),
            published,
            is_whole: optimizer.needs_whole_tensors(),
        }
    }

    /// The sum of their sizes.
    pub fn required(&self) -> Required {
        let streamed = self.master + self.sum + self.state.iter().sum::<u64>();
        let bytes = streamed + self.published;
        Required { bytes, fixed: if self.is_whole { bytes } else { self.published } }
    }
}

/// A number of bytes on servers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Required {
    /// All bytes.
    pub bytes: u64,
    /// Those that can only be in the memory of the device that computes, and not on disk or in the
    /// host memory of a server with a GPU.
    pub fixed: u64,
}

impl Required {
    /// Returns whether they fit into what is free.
    pub fn fits(self, free: Capacity) -> bool {
        self.bytes <= free.bytes && self.fixed <= free.memory
    }
}

impl Add for Required {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        let bytes = self.bytes.saturating_add(other.bytes);
        Self { bytes, fixed: self.fixed.saturating_add(other.fixed) }
    }
}

impl AddAssign for Required {
    fn add_assign(&mut self, other: Self) {
        *self = *self + other;
    }
}

/// The room of a shard server for the arrays of slices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Capacity {
    /// The bytes in all tiers.
    pub bytes: u64,
    /// The bytes in the memory of the devices that compute.
    pub memory: u64,
}

impl Capacity {
    /// Returns the rest of the capacity.
    #[must_use]
    pub fn without(self, used: Required) -> Self {
        let bytes = self.bytes.saturating_sub(used.bytes);
        Self { bytes, memory: self.memory.saturating_sub(used.fixed) }
    }
}

impl JobSpec {
    /// The codes of the 8-bit state tensors of a parameter group; none if the state is f32.
    pub fn state_codes(&self, group: usize) -> &'static [Code] {
        match self.state_dtype {
            StateDType::F32 => &[],
            StateDType::Int8 => self.groups[group].state_codes().unwrap_or_default(),
        }
    }

    /// The arrays of slice number `slice` on one server.
    pub fn arrays(&self, slice: usize) -> Arrays {
        let numel = self.manifest.slices()[slice].numel;
        self.arrays_of(self.manifest.tensor_of(slice), numel)
    }

    fn arrays_of(&self, tensor: &TensorSpec, numel: usize) -> Arrays {
        Arrays::of(tensor, self.groups.get(tensor.group as usize), self, numel)
    }

    /// The memory of each slice on one server.
    pub fn required_by_slice(&self) -> Vec<Required> {
        let mut all = Vec::with_capacity(self.manifest.number_of_slices());
        for tensor in self.manifest.tensors() {
            let (slices, step) = (number_of_slices(tensor), slice_numel(tensor));
            let Some(last) = slices.checked_sub(1) else { continue };
            // All slices but the last one have the same size.
            let of = |numel| self.arrays_of(tensor, numel).required();
            all.extend(std::iter::repeat_n(of(step), last));
            all.push(of(tensor.numel() as usize - last * step));
        }
        all
    }

    /// The memory of all slices on one server, which is needed [`JobSpec::replicas`] times. It is
    /// computed without cutting the tensors into slices, so that the time depends only on the
    /// number of tensors.
    pub fn required(&self) -> Required {
        let owners = self.manifest.tensors().iter().filter(|tensor| tensor.alias_of.is_none());
        owners.fold(Required::default(), |sum, tensor| {
            sum + self.arrays_of(tensor, tensor.numel() as usize).required()
        })
    }

    /// The memory of all slices on all servers.
    pub fn required_with_replicas(&self) -> Required {
        let Required { bytes, fixed } = self.required();
        let all = |bytes: u64| bytes.saturating_mul(self.replicas.into());
        Required { bytes: all(bytes), fixed: all(fixed) }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{Manifest, Policy, RunningAverage, geometry::blocks::SLICE};

    fn job(optimizer: &str, tensors: Vec<TensorSpec>) -> JobSpec {
        let optimizer: Optimizer = optimizer.parse().unwrap();
        let policy =
            if optimizer.needs_whole_tensors() { Policy::Whole } else { Policy::Elementwise };
        let tensors = tensors.into_iter().map(|tensor| TensorSpec { policy, ..tensor });
        JobSpec::new("job", Manifest::new(tensors.collect()).unwrap(), vec![optimizer])
    }

    #[test]
    fn each_kind_of_tensor_has_its_arrays() {
        let w = TensorSpec::new("w", [100]);
        let half = TensorSpec { dtype: DType::Bf16, ..w.clone() };
        let arrays = |optimizer: &str, tensor: TensorSpec| job(optimizer, vec![tensor]).arrays(0);
        let trained = Arrays { master: 400, sum: 400, ..Arrays::default() };
        let state = vec![400, 400];
        assert_eq!(arrays("adamw", w.clone()), Arrays { state: state.clone(), ..trained.clone() });
        let published = Arrays { published: 200, state, ..trained.clone() };
        assert_eq!(arrays("adamw", half.clone()), published.clone());
        assert_eq!(published.required(), Required { bytes: 1800, fixed: 200 });
        let int8 = JobSpec { state_dtype: StateDType::Int8, ..job("adamw", vec![half.clone()]) };
        assert_eq!(int8.arrays(0), Arrays { state: vec![101, 101], ..published });
        let whole = arrays("lamb", half.clone()).required();
        assert_eq!(whole, Required { bytes: 1800, fixed: 1800 });
        let frozen = |tensor| TensorSpec { frozen: true, ..tensor };
        let only_master = Arrays { master: 400, ..Arrays::default() };
        assert_eq!(arrays("adamw", frozen(w)), only_master);
        assert_eq!(arrays("adamw", frozen(half)).required(), Required { bytes: 200, fixed: 200 });
    }

    #[test]
    fn the_memory_of_a_huge_job_is_known_without_its_slices() {
        let spec = job("adamw", vec![TensorSpec::new("w", [1 << 44])]);
        assert_eq!(spec.required(), Required { bytes: 16 << 44, fixed: 0 });
        let spec = JobSpec { replicas: 64, min_servers: 64, ..spec };
        assert_eq!(spec.required_with_replicas().bytes, 1 << 54);
    }

    proptest! {
        #[test]
        fn the_memory_of_a_job_is_that_of_its_slices(
            sizes in prop::collection::vec((0u64..40, 0u64..3 * SLICE as u64 / 20), 1..6),
            optimizer in prop::sample::select(Optimizer::NAMES),
            half: bool,
            eight_bits: bool,
            averages in 0usize..3,
        ) {
            let mut tensors: Vec<_> = sizes.iter().enumerate().map(|(index, &(rows, columns))| {
                let dtype = if half { DType::Bf16 } else { DType::F32 };
                TensorSpec { dtype, frozen: index % 3 == 2, ..TensorSpec::new(format!("t{index}"), [rows, columns]) }
            }).collect();
            let tied = TensorSpec { alias_of: Some("t0".to_owned()), ..tensors[0].clone() };
            tensors.push(TensorSpec { name: "tied".to_owned(), ..tied });
            let mut spec = job(optimizer, tensors);
            if eight_bits && spec.groups[0].state_codes().is_some() {
                spec.state_dtype = StateDType::Int8;
            }
            spec.averages =
                (0..averages).map(|i| RunningAverage::exponential(i.to_string(), 0.9)).collect();
            let by_slice = spec.required_by_slice();
            let slices = spec.manifest.slices().len();
            prop_assert_eq!(&by_slice, &(0..slices).map(|slice| spec.arrays(slice).required()).collect::<Vec<_>>());
            prop_assert_eq!(by_slice.into_iter().fold(Required::default(), Add::add), spec.required());
        }
    }
}
