//! The tier of each array of slices: a pure function.
//!
//! A step visits every slice, always in the same order. An array that was used least recently is
//! therefore the next one to be used, and a cache that keeps the most recent ones would always have
//! the wrong ones. So the same arrays stay in memory for the life of the job, as many as fit, and
//! the others are read and written in each step.

use zeroshard_model::{
    JobSpec, StateDType, average::AVERAGE_PARTS, direct::PAGE, limits::MAX_AVERAGES,
};

use super::form::PIECE;

/// The largest number of state tensors of an optimizer.
pub(super) const OPTIMIZER_STATE: usize = 3;
/// The largest number of state tensors, with those of averages.
const MAX_STATE: usize = OPTIMIZER_STATE + AVERAGE_PARTS * MAX_AVERAGES;

/// An array that a slice has, by its content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// The master weights; for a slice that is not trained, its parameters.
    Master,
    /// The sum of the gradients.
    Sum,
    /// The state tensor at this position.
    State(usize),
}

/// Where an array is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub enum Tier {
    /// In the memory of the device that computes: that of the GPU, or host memory without one.
    #[default]
    Memory,
    /// In host memory, on a server with a GPU.
    Host,
    /// On disk.
    Disk,
}

impl Tier {
    /// All tiers, the fastest first.
    pub const ALL: [Self; 3] = [Self::Memory, Self::Host, Self::Disk];
}

/// The tiers of the arrays of one slice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Places {
    master: Tier,
    sum: Tier,
    state: [Tier; MAX_STATE],
}

impl Places {
    /// The tier of an array.
    pub fn tier(self, array: Kind) -> Tier {
        match array {
            Kind::Master => self.master,
            Kind::Sum => self.sum,
            Kind::State(position) => self.state[position],
        }
    }

    pub fn are_all_in_memory(self) -> bool {
        self == Self::default()
    }

    fn set(&mut self, array: Kind, tier: Tier) {
        *match array {
            Kind::Master => &mut self.master,
            Kind::Sum => &mut self.sum,
            Kind::State(position) => &mut self.state[position],
        } = tier;
    }
}

#[cfg(test)]
impl FromIterator<(Kind, Tier)> for Places {
    fn from_iter<T: IntoIterator<Item = (Kind, Tier)>>(arrays: T) -> Self {
        let mut places = Self::default();
        arrays.into_iter().for_each(|(array, tier)| places.set(array, tier));
        places
    }
}

/// The sizes of the arrays of one slice, in bytes.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Sizes {
    /// The bytes that are always in memory: parameters whose dtype is not f32, and all arrays of
    /// optimizers whose steps need whole tensors.
    pub fixed: u64,
    /// The other arrays.
    pub arrays: Vec<(Kind, u64)>,
    /// The number of state tensors that are 8-bit state; they are the first ones.
    pub coded: usize,
}

impl Sizes {
    /// The bytes of all arrays.
    pub fn bytes(&self) -> u64 {
        self.fixed + self.arrays.iter().map(|(_, bytes)| bytes).sum::<u64>()
    }

    /// The sizes of slice number `index` of a job.
    pub fn of(job: &JobSpec, index: usize) -> Self {
        let all = job.arrays(index);
        let fixed = all.required().fixed;
        if all.is_whole {
            return Self { fixed, ..Self::default() };
        }
        let state = all.state.into_iter().enumerate();
        let state = state.map(|(position, bytes)| (Kind::State(position), bytes));
        let both = [(Kind::Master, all.master), (Kind::Sum, all.sum)];
        let both = both.into_iter().filter(|&(_, bytes)| bytes > 0);
        let arrays = both.chain(state).collect();
        let coded = job.state_codes(job.manifest.tensor_of(index).group as usize).len();
        Self { fixed, arrays, coded }
    }

    /// The bytes that an array takes in a tier. Outside of memory, it begins with a page, and each
    /// of its pieces as well.
    fn room(&self, tier: Tier, (kind, bytes): (Kind, u64)) -> u64 {
        let page = PAGE as u64;
        match (tier, kind) {
            (Tier::Memory, _) => bytes,
            (_, Kind::State(position)) if position < self.coded => {
                let piece = StateDType::Int8.bytes(PIECE) as u64;
                bytes / piece * piece.next_multiple_of(page)
                    + (bytes % piece).next_multiple_of(page)
            }
            _ => bytes.next_multiple_of(page),
        }
    }
}

/// Where the arrays of slices are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Plan {
    /// The tiers of the arrays of each slice, in the order of the sizes.
    pub places: Vec<Places>,
    /// The bytes in each tier. Outside of memory, each array begins with a page.
    pub bytes: [u64; 3],
}

/// The arrays do not fit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Shortage {
    /// The bytes of all arrays.
    pub required: u64,
    /// The bytes of arrays that must be in memory.
    pub fixed: u64,
    /// The bytes of state tensors that need not be in memory.
    pub state: u64,
}

/// Puts each array into the fastest tier that has room, in the order of the traffic that each byte
/// of memory saves: master weights, which are also sent to every rank, then sums, which further
/// ranks read and write again, then the optimizer state. Within a kind, the first slices are kept.
/// `free`: the bytes that each tier has. `fastest_of_state`: no state tensor is in a faster tier.
///
/// # Errors
/// [`Shortage`] if not everything fits.
pub(crate) fn plan(
    slices: &[Sizes],
    free: [u64; 3],
    fastest_of_state: Tier,
) -> Result<Plan, Shortage> {
    let fixed = slices.iter().map(|slice| slice.fixed).sum();
    let arrays = || slices.iter().flat_map(|slice| &slice.arrays);
    let required = fixed + arrays().map(|(_, bytes)| bytes).sum::<u64>();
    let is_state = |(kind, _): &&(Kind, u64)| matches!(kind, Kind::State(_));
    let state = arrays().filter(is_state).map(|(_, bytes)| bytes).sum();
    let shortage = Shortage { required, fixed, state };
    let mut plan = Plan { places: vec![Places::default(); slices.len()], bytes: [fixed, 0, 0] };
    if fixed > free[Tier::Memory as usize] {
        return Err(shortage);
    }
    // After the first array that does not fit into a tier, smaller ones are not kept there either:
    // more memory then never means that an array moves to a slower tier.
    let mut tier = Tier::Memory;
    for kind in [Kind::Master, Kind::Sum].into_iter().chain((0..MAX_STATE).map(Kind::State)) {
        if let Kind::State(_) = kind {
            tier = tier.max(fastest_of_state);
        }
        for (slice, places) in slices.iter().zip(&mut plan.places) {
            for &sized in slice.arrays.iter().filter(|(array, _)| *array == kind) {
                let fits = |&tier: &Tier| {
                    plan.bytes[tier as usize].saturating_add(slice.room(tier, sized))
                        <= free[tier as usize]
                };
                let tiers = Tier::ALL.into_iter().filter(|other| *other >= tier);
                tier = tiers.into_iter().find(fits).ok_or(shortage)?;
                places.set(kind, tier);
                plan.bytes[tier as usize] += slice.room(tier, sized);
            }
        }
    }
    Ok(plan)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use zeroshard_model::{DType, Manifest, TensorSpec};

    use super::*;

    /// Sizes of arrays, and by how much a budget grows: a part of a page, or some pages. Arrays of
    /// one page outside of memory are all alike, and the order in which they are placed does not
    /// matter.
    fn any_bytes() -> impl Strategy<Value = u64> {
        prop_oneof![0u64..100, 0u64..20_000]
    }

    fn any_slices() -> impl Strategy<Value = Vec<Sizes>> {
        let array = |array| (Just(array), any_bytes());
        let state = prop::collection::vec(any_bytes(), 0..4);
        let slice = (0u64..20, array(Kind::Master), array(Kind::Sum), state);
        let slice = slice.prop_map(|(fixed, master, sum, state)| {
            let state = state.into_iter().enumerate().map(|(i, bytes)| (Kind::State(i), bytes));
            let arrays = [master, sum].into_iter().chain(state).collect();
            Sizes { fixed, arrays, ..Sizes::default() }
        });
        prop::collection::vec(slice, 0..12)
    }

    fn any_free() -> impl Strategy<Value = [u64; 3]> {
        let memory = prop_oneof![0u64..2_000, 0u64..100_000];
        (memory, 0u64..100_000, 0u64..400_000).prop_map(|(memory, host, disk)| [memory, host, disk])
    }

    /// The tiers of all arrays that a slice has.
    fn tiers<'a>(
        slices: &'a [Sizes],
        plan: &'a Plan,
    ) -> impl Iterator<Item = (Kind, u64, Tier)> + 'a {
        slices.iter().zip(&plan.places).flat_map(|(slice, places)| {
            slice.arrays.iter().map(|&(array, bytes)| (array, bytes, places.tier(array)))
        })
    }

    proptest! {
        #[test]
        fn every_array_is_in_one_tier_and_no_budget_is_exceeded(
            slices in any_slices(), free in any_free(), state_in_memory in any::<bool>(),
        ) {
            let fastest = if state_in_memory { Tier::Memory } else { Tier::Host };
            let fixed: u64 = slices.iter().map(|slice| slice.fixed).sum();
            match plan(&slices, free, fastest) {
                Ok(plan) => {
                    prop_assert!(plan.bytes.iter().zip(free).all(|(&used, free)| used <= free));
                    let mut found = [fixed, 0, 0];
                    for (array, bytes, tier) in tiers(&slices, &plan) {
                        found[tier as usize] += Sizes::default().room(tier, (array, bytes));
                        prop_assert!(!matches!(array, Kind::State(_)) || tier >= fastest);
                    }
                    prop_assert_eq!(found, plan.bytes);
                }
                Err(Shortage { required, fixed, .. }) => {
                    // A whole array is in one tier, so each tier may have room for less than the
                    // largest one. It begins with a page outside of memory. State leaves memory
                    // unused.
                    let arrays = || slices.iter().flat_map(|slice| &slice.arrays);
                    let room = |&sized| Sizes::default().room(Tier::Disk, sized);
                    let largest = arrays().map(room).max();
                    let pages = (arrays().count() * PAGE) as u64;
                    let lost = pages + Tier::ALL.len() as u64 * largest.unwrap_or_default();
                    let memory = if state_in_memory { free[0] } else { 0 };
                    prop_assert!(fixed > free[0] || required + lost > memory + free[1] + free[2]);
                }
            }
        }

        #[test]
        fn more_room_in_a_tier_moves_no_array_to_a_slower_one(
            slices in any_slices(), free in any_free(), grown in 0usize..3, more in any_bytes(),
            state_in_memory in any::<bool>(),
        ) {
            let fastest = if state_in_memory { Tier::Memory } else { Tier::Host };
            let mut much = free;
            much[grown] += more;
            if let Ok(little) = plan(&slices, free, fastest) {
                let much = plan(&slices, much, fastest);
                prop_assert!(much.is_ok(), "what fits also fits with more room");
                let much = much.expect("it has just been checked");
                for (little, much) in tiers(&slices, &little).zip(tiers(&slices, &much)) {
                    prop_assert!(much.2 <= little.2);
                }
            }
        }

        #[test]
        fn what_fits_is_in_memory(slices in any_slices()) {
            let [needed, ..] = plan(&slices, [u64::MAX, 0, 0], Tier::Memory).unwrap().bytes;
            let plan = plan(&slices, [needed, 0, 0], Tier::Memory).unwrap();
            prop_assert!(plan.places.iter().all(|places| places.are_all_in_memory()));
            if let Some(less) = needed.checked_sub(1) {
                prop_assert!(super::plan(&slices, [less, 0, 0], Tier::Memory).is_err());
            }
        }

        #[test]
        fn state_leaves_a_tier_before_sums_and_sums_before_master_weights(
            slices in any_slices(), free in any_free(),
        ) {
            let [memory, host, _] = free;
            let Ok(plan) = plan(&slices, [memory, host, u64::MAX], Tier::Memory) else {
                return Ok(());
            };
            let of = |kind: Kind| {
                let tiers = tiers(&slices, &plan).filter(move |(array, ..)| *array == kind);
                tiers.map(|(.., tier)| tier)
            };
            for (first, later) in [(Kind::Master, Kind::Sum), (Kind::Sum, Kind::State(0))] {
                if let (Some(slowest), Some(fastest)) = (of(first).max(), of(later).min()) {
                    prop_assert!(slowest <= fastest);
                }
            }
        }
    }

    #[test]
    fn half_of_adamw_is_master_weights_and_sums() {
        let manifest = Manifest::new(vec![TensorSpec::new("w", [100]), TensorSpec::new("v", [50])]);
        let job = JobSpec::new("job", manifest.unwrap(), vec!["adamw".parse().unwrap()]);
        let sizes: Vec<Sizes> = (0..2).map(|index| Sizes::of(&job, index)).collect();
        let plan = plan(&sizes, [8 * 150, 0, 1 << 20], Tier::Memory).unwrap();
        for places in plan.places {
            let arrays = [Kind::Master, Kind::Sum, Kind::State(0), Kind::State(1)];
            let (memory, disk) = (Tier::Memory, Tier::Disk);
            assert_eq!(arrays.map(|array| places.tier(array)), [memory, memory, disk, disk]);
        }
    }

    #[test]
    fn what_a_step_cannot_stream_is_always_in_memory() {
        let half = TensorSpec { dtype: DType::Bf16, ..TensorSpec::new("w", [100]) };
        let frozen = TensorSpec { frozen: true, ..TensorSpec::new("v", [100]) };
        let manifest = Manifest::new(vec![half, frozen]).unwrap();
        let sizes = |optimizer: &str| {
            let groups = vec![optimizer.parse().unwrap()];
            let job = JobSpec::new("job", manifest.clone(), groups);
            [0, 1].map(|index| Sizes::of(&job, index))
        };
        let fixed = |optimizer| sizes(optimizer).map(|sizes| sizes.fixed);
        assert_eq!(fixed("adamw"), [200, 0]);
        assert_eq!(fixed("lamb"), [200 + 1_600, 0]);
        assert_eq!(
            plan(&sizes("lamb"), [1_799, 9_999, 9_999], Tier::Memory),
            Err(Shortage { required: 2_200, fixed: 1_800, state: 0 })
        );
    }
}
