//! What of a tensor a transfer moves, and what a rank has to do with it.

use std::ops::Range;

use zeroshard_proto::{BoxView, JobSpec, SliceSpec, TensorBox, pb};

/// A tensor, or a box of it. Its elements are numbered row-major; those that lie in one slice are
/// consecutive.
#[derive(Debug, Clone)]
pub(crate) struct Region {
    /// How the box lies in the tensor; `None`: it is all of it.
    view: Option<BoxView>,
    area: TensorBox,
}

impl Region {
    /// `area` of a tensor of `shape`, which it fits.
    pub(crate) fn new(shape: &[u64], area: TensorBox) -> Self {
        let view = (area != TensorBox::whole(shape)).then(|| BoxView::new(shape, &area));
        Self { view, area }
    }

    pub(crate) fn is_whole(&self) -> bool {
        self.view.is_none()
    }

    pub(crate) fn area(&self) -> &TensorBox {
        &self.area
    }

    pub(crate) fn numel(&self) -> usize {
        self.area.numel() as usize
    }

    /// The elements that lie in a slice, by their numbers in the region.
    pub(crate) fn part(&self, slice: &SliceSpec) -> Range<usize> {
        let elements = slice.offset..slice.offset + slice.numel;
        self.view.as_ref().map_or(elements.clone(), |view| view.part(elements))
    }

    /// The box, of tensor number `tensor`; `None`: it is all of it.
    pub(crate) fn to_wire(&self, tensor: usize) -> Option<pb::Box> {
        self.view.as_ref().map(|_| self.area.to_wire(tensor))
    }
}

/// What a rank has of a tensor, and what it contributes to its gradient.
#[derive(Debug, Clone)]
pub(crate) struct Share {
    pub(crate) region: Region,
    /// Its place among those who contribute the same, and their number; `None`: it contributes
    /// nothing.
    turn: Option<(u32, u32)>,
}

impl Share {
    /// Those of `rank`, one for each tensor of the job.
    pub(crate) fn all(job: &JobSpec, rank: u32) -> Vec<Self> {
        let share = |tensor: usize| {
            let contributions = job.contributions(tensor);
            let turn = contributions.lane_of(rank).map(|lane| {
                let ranks = &contributions.lanes[lane].ranks;
                (ranks.partition_point(|&other| other < rank) as u32, ranks.len() as u32)
            });
            let shape = &job.manifest.tensors()[tensor].shape;
            Self { region: Region::new(shape, job.local_box(tensor, rank)), turn }
        };
        (0..job.manifest.tensors().len()).map(share).collect()
    }

    /// Whether the rank contributes anything.
    pub(crate) fn contributes(&self) -> bool {
        self.turn.is_some()
    }

    /// Whether the rank uploads what its region begins with.
    pub(crate) fn uploads(&self) -> bool {
        self.turn.is_some_and(|(place, _)| place == 0)
    }

    /// How many add to a slice before the rank: servers add in cyclic order.
    pub(crate) fn waits(&self, slice: u32) -> u32 {
        self.turn.map_or(0, |(place, of)| (place + of - slice % of) % of)
    }
}
