//! Writes a version to the arrays of a reader, and checks its hashes.

use std::{collections::BTreeMap, ops::Range};

use tokio::time::sleep;
use zeroshard_changes::{
    Copied, Part, SliceChange,
    apply::{self, Place},
    hash,
};
use zeroshard_model::{DType, Error, Result, TensorId};
use zeroshard_net::Deadline;

use super::{
    FollowedVersion, Follower, REFRESH,
    changes::malformed,
    version::{Content, Values},
};
use crate::{Pinned, Slots, Target, pull, retry::is_answer};

/// The arrays of a reader, by the index of the tensor that owns the storage.
pub(super) type Arrays<'a> = BTreeMap<usize, Slots<'a>>;

/// The version of a full copy, and the hashes of all slices.
pub(super) type Copy = (u64, BTreeMap<u32, u64>);

impl Follower {
    /// Writes a version to the reader's arrays. Pass the array of each followed tensor, in its
    /// dtype ([`Self::dtype_of`]), with all elements of the tensor or of its box
    /// ([`Self::bounds`]). While it writes the values, this method computes the hash of
    /// each slice, and compares it with that of the server. If one differs, somebody else has
    /// written to the arrays: the method takes all values back, fetches a full copy of the newest
    /// version, and `version` gets its number. It does the same if [`Self::apply_gathered`] has
    /// returned `false`.
    ///
    /// # Errors
    /// [`Error::Refused`] and [`Error::Invalid`] if an array is missing or has another size or
    /// dtype; [`Error::Refused`] if the version does not follow the one in the arrays. In these
    /// cases nothing is written. If a full copy fails ([`Error::Unavailable`],
    /// [`Error::OutOfMemory`], [`Error::Timeout`] and those of [`crate::Pinned::pull`]), the arrays
    /// hold values of several versions, and the next version is a full copy.
    pub async fn apply(
        &mut self,
        version: &mut FollowedVersion,
        targets: Vec<Target<'_>>,
    ) -> Result<()> {
        let mut arrays = self.arrays(targets)?;
        if let Content::Changes { from, slices } = &version.content
            && self.version().is_some()
        {
            self.check_holds(*from)?;
            let parts = self.parts(slices, &mut arrays);
            let changed = self.reader.apply(parts);
            match changed.map_err(|(slice, error)| malformed(slice, &error))? {
                Some(changed) => {
                    version.changed = Some(changed);
                    self.hold(version);
                    return Ok(());
                }
                None => self.reader.lose(Copied::Differed),
            }
        }
        self.copy(version, &mut arrays).await
    }

    /// Returns the positions of the changed elements in the array of a tensor, ascending, or `None`
    /// for a full copy. Use it with [`Self::apply_gathered`] if the arrays are outside the memory
    /// of this process.
    ///
    /// # Errors
    /// [`Error::Internal`] for a malformed change.
    pub fn positions(&self, version: &FollowedVersion, tensor: usize) -> Result<Option<Vec<u64>>> {
        let Content::Changes { slices, .. } = &version.content else { return Ok(None) };
        let mut all = Vec::new();
        for (slice, (dtype, part), change) in self.changes_of(slices, tensor) {
            let positions = apply::positions(dtype, part.len(), &change.change);
            let positions = positions.map_err(|error| malformed(slice, &error))?;
            all.extend(positions.into_iter().map(|position| position + part.start as u64));
        }
        Ok(Some(all))
    }

    /// Replaces old values with those of `version`. `gathered` has the values at
    /// [`Self::positions`], for each followed tensor that owns its storage. After `true`, write the
    /// values to your arrays, which then have this version. After `false`, the hashes differ:
    /// discard the values, and call [`Self::apply`] to fetch a full copy.
    ///
    /// # Errors
    /// Those of [`Self::apply`].
    pub fn apply_gathered(
        &mut self,
        version: &mut FollowedVersion,
        gathered: &mut BTreeMap<usize, &mut [u8]>,
    ) -> Result<bool> {
        let Content::Changes { from, slices } = &version.content else {
            return Err(Error::refused("a full copy cannot be applied to some elements"));
        };
        self.check_holds(*from)?;
        let (mut changed, mut is_equal) = (0, true);
        for tensor in self.tensors() {
            let Some(values) = gathered.get_mut(&tensor) else { return Err(self.missing(tensor)) };
            let mut values = &mut **values;
            for (slice, (dtype, part), change) in self.changes_of(slices, tensor) {
                let place = Place { dtype, first: part.start as u64 };
                let effect = apply::apply_gathered(place, part.len(), values, &change.change);
                let effect = effect.map_err(|error| malformed(slice, &error))?;
                changed += effect.changed;
                values = &mut values[effect.changed as usize * dtype.size()..];
                is_equal &= self.reader.fits(slice, effect.difference, change);
            }
        }
        match is_equal {
            true => {
                version.changed = Some(changed);
                self.hold(version);
            }
            false => self.reader.lose(Copied::Differed),
        }
        Ok(is_equal)
    }

    /// Returns the slices of a tensor, each with the dtype and the positions of its values, and
    /// with its change.
    fn changes_of<'a>(
        &'a self,
        slices: &'a BTreeMap<u32, SliceChange>,
        tensor: usize,
    ) -> impl Iterator<Item = (u32, (DType, Range<usize>), &'a SliceChange)> {
        let manifest = &self.of.spec.manifest;
        let of = manifest.slices_of(tensor).map(|slice| slice as u32);
        of.filter_map(|slice| {
            let place = self.views.place(&manifest.slices()[slice as usize])?;
            Some((slice, place, slices.get(&slice)?))
        })
    }

    /// Checks that the arrays have version `from`.
    fn check_holds(&self, from: u64) -> Result<()> {
        if self.version() == Some(from) {
            return Ok(());
        }
        let has = self.version().map_or("none".to_owned(), |version| version.to_string());
        Err(Error::refused(format!(
            "the version has the changes since version {from}, and the arrays have {has}; apply \
             the one that the follower returns next"
        )))
    }

    /// Notes that the arrays have the version.
    fn hold(&mut self, version: &FollowedVersion) {
        let Content::Changes { slices, .. } = &version.content else { return };
        self.reader.advance(version.number, slices);
    }

    fn missing(&self, tensor: usize) -> Error {
        let name = &self.of.spec.manifest.tensors()[tensor].name;
        Error::refused(format!("the follower needs an array for tensor {name:?}"))
    }

    /// Checks that there is an array for each followed tensor, of its size and dtype.
    fn arrays<'a>(&self, targets: Vec<Target<'a>>) -> Result<Arrays<'a>> {
        let manifest = &self.of.spec.manifest;
        let mut arrays = Arrays::new();
        for Target { tensor, bounds, data } in targets {
            let Some(spec) = manifest.tensors().get(tensor.index()) else {
                return Err(Error::refused(
                    "the follower got an array for a tensor that is not there",
                ));
            };
            // Tied tensors have one storage.
            let (name, owner) = (&spec.name, manifest.owner(tensor.index()));
            let (dtype, numel) = (self.dtype_of(owner), self.numel_of(owner));
            if bounds.is_some() || data.len() != numel || data.dtype() != dtype {
                let of = self.bounds(owner).map_or("tensor", |_| "box");
                return Err(Error::invalid(
                    format!("array for tensor {name:?}"),
                    format!("{} elements of {}", data.len(), data.dtype()),
                    format!("all {numel} elements of the {of} as {dtype}"),
                ));
            }
            arrays.insert(owner, data);
        }
        match self.views.tensors().find(|tensor| !arrays.contains_key(tensor)) {
            None => Ok(arrays),
            Some(tensor) => Err(self.missing(tensor)),
        }
    }

    /// Returns the slices that change, with the reader's values.
    fn parts<'a>(
        &self,
        slices: &'a BTreeMap<u32, SliceChange>,
        arrays: &'a mut Arrays<'_>,
    ) -> Vec<Part<'a>> {
        let manifest = &self.of.spec.manifest;
        let mut parts = Vec::with_capacity(slices.len());
        for (tensor, array) in arrays {
            let mut rest = array.bytes_mut();
            for slice in manifest.slices_of(*tensor) {
                let place = self.views.place(&manifest.slices()[slice]);
                let Some((dtype, positions)) = place else { continue };
                let (values, behind) = rest.split_at_mut(positions.len() * dtype.size());
                rest = behind;
                let slice = slice as u32;
                let place = Place { dtype, first: positions.start as u64 };
                parts.extend(slices.get(&slice).map(|change| Part {
                    slice,
                    place,
                    values,
                    change,
                }));
            }
        }
        parts
    }

    /// Fetches all values of the pinned version, or of the newest one if none is pinned.
    async fn copy(&mut self, version: &mut FollowedVersion, arrays: &mut Arrays<'_>) -> Result<()> {
        let deadline = Deadline::after(self.cluster.options.timeout);
        loop {
            let has_values = match &version.content {
                Content::Full(Values::Pinned(_), _) => true,
                Content::Full(Values::Mirror, _) => self.mirror.is_some(),
                _ => false,
            };
            if !has_values {
                self.reader.show_again();
                *version = self.newest(deadline).await?;
            }
            let Content::Full(values, reason) = &version.content else { continue };
            let reason = *reason;
            self.reader.begin_copy();
            let copied = match (values, self.mirror.clone()) {
                (Values::Pinned(pinned), _) => self.pull(pinned, arrays).await,
                (Values::Mirror, Some(mirror)) => {
                    self.copy_of_mirror((&mirror, version.number), arrays).await
                }
                (Values::Mirror | Values::Gone, _) => continue,
            };
            match copied {
                Ok((number, hashes)) => {
                    let bytes = arrays.values_mut().map(|array| array.bytes_mut().len() as u64);
                    (version.number, version.bytes) = (number, bytes.sum());
                    self.reader.end_copy(number, reason, hashes);
                    // Releases the pin.
                    version.content = Content::Full(Values::Gone, reason);
                    return Ok(());
                }
                // The pin, its server or the mirror is gone: fetch another version.
                Err(error)
                    if (matches!(error, Error::VersionGone { .. }) || !is_answer(&error))
                        && !deadline.left().is_zero() =>
                {
                    tracing::debug!(%error, "a full copy was interrupted");
                }
                Err(error) => return Err(error),
            }
            version.content = Content::Full(Values::Gone, reason);
            sleep(REFRESH).await;
            self.describe().await?;
        }
    }

    /// Fetches a pinned version. Returns its number, and the hashes of all slices.
    async fn pull(&self, pinned: &Pinned, arrays: &mut Arrays<'_>) -> Result<Copy> {
        let targets = arrays.iter_mut().map(|(tensor, array)| Target {
            tensor: TensorId::new(*tensor),
            bounds: self.bounds(*tensor).cloned(),
            data: array.reborrow(),
        });
        let manifest = &self.of.spec.manifest;
        let targets = pull::by_wire(manifest, self.follow.dtype.into(), targets.collect());
        pinned.pull_encoded(targets).await?;
        Ok((pinned.version(), self.hashes(arrays)))
    }

    /// Computes the hashes of all slices.
    pub(super) fn hashes(&self, arrays: &mut Arrays<'_>) -> BTreeMap<u32, u64> {
        let manifest = &self.of.spec.manifest;
        let mut hashes = BTreeMap::new();
        for (tensor, array) in arrays {
            for slice in manifest.slices_of(*tensor) {
                let place = self.views.place(&manifest.slices()[slice]);
                let Some((dtype, positions)) = place else { continue };
                let first = positions.start as u64;
                hashes.insert(slice as u32, hash::of(dtype, first, part(array, positions)));
            }
        }
        hashes
    }
}

/// Returns the values at these positions of an array.
pub(super) fn part<'a>(array: &'a mut Slots<'_>, positions: Range<usize>) -> &'a mut [u8] {
    let size = array.dtype().size();
    &mut array.bytes_mut()[positions.start * size..positions.end * size]
}
