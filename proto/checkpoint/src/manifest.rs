//! The index of a checkpoint: what was saved, its files, and the hash of everything in them.

use std::{collections::BTreeSet, time::SystemTime};

use blake3::Hash;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use zeroshard_model::{AppliedSteps, Error, JobSpec, Line, LineVersion, RecentSteps, Result};
use zeroshard_proto::pb;

use crate::{
    format, hash,
    stored::{is_zero, read_line, stored_skips},
};

/// The latest version of the format that this program reads and writes.
const FORMAT: u32 = 2;
/// The format that earlier programs read, too: without averages, on line 0, and without skipped
/// batches.
const FIRST: u32 = 1;

/// The manifest of a checkpoint.
#[derive(Debug, Clone)]
pub struct Manifest {
    contents: Contents,
    spec: JobSpec,
    /// The place of each slice.
    places: Vec<Place>,
}

/// Where a slice is.
#[derive(Debug, Clone, Copy, Default)]
struct Place {
    file: usize,
    /// Its position among the slices of the file.
    position: usize,
    /// The offset of its first byte in the file.
    start: u64,
}

/// The content of `manifest.json`.
#[derive(Debug, Serialize, Deserialize)]
struct Document {
    /// BLAKE3 of the text of `checkpoint`.
    blake3: String,
    checkpoint: Box<RawValue>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct Contents {
    /// The version of the format.
    format: u32,
    /// The name of the job.
    job: String,
    /// The id of the job.
    job_id: u64,
    /// The version of the parameters that was saved.
    version: u64,
    /// Its line. Line 0 is not stored.
    #[serde(default, skip_serializing_if = "is_zero")]
    line: u64,
    /// The batches that the line skips, as (begin, end) pairs. `end` is not skipped.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    skips: Vec<(u64, u64)>,
    /// The number of the save, with which the names of its files begin.
    save: u64,
    /// When the checkpoint was completed, in seconds since 1970.
    created: u64,
    /// The specification of the job, with all tensors and the optimizers.
    spec: pb::JobSpec,
    /// The files of slices, and that of the data of ranks.
    files: Vec<File>,
    /// The ranks whose data was lost before the save.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    lost_ranks: Vec<u32>,
    /// The figures of the steps before the version, if the job has a policy on spikes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    recent: Option<pb::RecentSteps>,
}

/// A file of a checkpoint.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct File {
    /// Its name in the directory of the version.
    pub(crate) name: String,
    /// Its size.
    pub(crate) bytes: u64,
    /// BLAKE3 of its length prefix and header, in hexadecimal digits.
    #[serde(with = "hash::hex")]
    pub(crate) header: Hash,
    /// Its slices, in the order in which they are stored.
    pub(crate) slices: Vec<SliceEntry>,
    /// The ranks whose data the file has. Such a file has no slices.
    #[serde(default)]
    pub(crate) ranks: Vec<RankEntry>,
}

/// A slice in a file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct SliceEntry {
    /// The index of the slice in the job.
    pub(crate) slice: u32,
    /// The number of steps that were applied to it.
    pub(crate) applied: u64,
    /// State that is one number for a whole tensor, as f64, whose text is exact.
    #[serde(default)]
    scalar_state: Vec<f64>,
    /// The number of steps that have counted for the averages of the job.
    #[serde(default, skip_serializing_if = "is_zero")]
    averaged: u64,
    /// BLAKE3 of each of its tensors, in hexadecimal digits.
    #[serde(with = "hash::hex_list")]
    pub(crate) hashes: Vec<Hash>,
}

/// The data of a rank.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct RankEntry {
    /// The rank.
    pub(crate) rank: u32,
    /// The size of its data.
    pub(crate) bytes: u64,
    /// BLAKE3 of its data, in hexadecimal digits.
    #[serde(with = "hash::hex")]
    pub(crate) hash: Hash,
}

impl Manifest {
    /// The manifest of a save whose files are written.
    ///
    /// # Errors
    /// [`Error::Internal`] unless each slice of the job is in exactly one file, with a hash for
    /// each part.
    pub fn new(
        spec: &JobSpec,
        job_id: u64,
        LineVersion { version, line }: LineVersion,
        save: u64,
        files: Vec<pb::CheckpointFile>,
    ) -> Result<Self> {
        let since_epoch = SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default();
        let files = files.into_iter().map(|file| File::of_message(file, spec));
        let is_first = line == 0 && spec.averages.is_empty() && spec.spikes.is_none();
        let contents = Contents {
            format: if is_first { FIRST } else { FORMAT },
            job: spec.name.clone(),
            job_id,
            version,
            line,
            skips: Vec::new(),
            save,
            created: since_epoch.as_secs(),
            spec: spec.into(),
            files: files.collect::<Result<_>>()?,
            lost_ranks: Vec::new(),
            recent: None,
        };
        Self::of(contents, spec.clone()).map_err(|cause| Error::Internal {
            cause: format!("the files of version {version} of job {:?}: {cause}", spec.name),
        })
    }

    /// Adds the batches that `line` skips.
    pub fn skipping(mut self, line: &Line) -> Self {
        self.contents.skips = stored_skips(line);
        if !self.contents.skips.is_empty() {
            self.contents.format = FORMAT;
        }
        self
    }

    /// Adds the figures of the steps before the version, which a policy on spikes needs.
    pub fn after(mut self, recent: &RecentSteps) -> Self {
        self.contents.recent = self.spec.spikes.is_some().then(|| recent.into());
        self
    }

    /// The same checkpoint, which lacks the data of these ranks: it was lost before the save.
    pub fn without_data_of(mut self, ranks: impl IntoIterator<Item = u32>) -> Self {
        self.contents.lost_ranks = ranks.into_iter().collect();
        self
    }

    fn of(contents: Contents, spec: JobSpec) -> Result<Self, String> {
        check_complete(&contents.files, spec.manifest.number_of_slices())?;
        let mut places = vec![Place::default(); spec.manifest.number_of_slices()];
        for (number, file) in contents.files.iter().enumerate() {
            let mut start = file.check(&spec)?;
            for (position, entry) in file.slices.iter().enumerate() {
                let slice = entry.slice as usize;
                places[slice] = Place { file: number, position, start };
                start += format::slice_bytes(&spec, slice);
            }
        }
        Ok(Self { contents, spec, places })
    }

    /// Reads `manifest.json`.
    ///
    /// # Errors
    /// A text, if it is damaged or of a later format.
    pub(crate) fn parse(text: &[u8]) -> Result<Self, String> {
        let invalid = |error: serde_json::Error| format!("it is not a manifest: {error}");
        let document: Document = serde_json::from_slice(text).map_err(invalid)?;
        let checkpoint = document.checkpoint.get();
        if blake3::hash(checkpoint.as_bytes()).to_hex().as_str() != document.blake3 {
            return Err("its hash is wrong".to_owned());
        }
        #[derive(Deserialize)]
        struct Format {
            format: u32,
        }
        let Format { format } = serde_json::from_str(checkpoint).map_err(invalid)?;
        if format > FORMAT {
            return Err(format!(
                "its format is {format}, and this version of ZeroShard reads up to {FORMAT}; \
                 install a later version"
            ));
        }
        let contents: Contents = serde_json::from_str(checkpoint).map_err(invalid)?;
        let spec = JobSpec::try_from(contents.spec.clone()).map_err(|error| error.to_string())?;
        if spec.name != contents.job {
            return Err(format!("it is of job {:?} and job {:?}", contents.job, spec.name));
        }
        Self::of(contents, spec)
    }

    /// The text of `manifest.json`.
    pub(crate) fn text(&self) -> Result<String> {
        let internal = |error: serde_json::Error| Error::Internal { cause: error.to_string() };
        let checkpoint = serde_json::to_string_pretty(&self.contents).map_err(internal)?;
        let blake3 = blake3::hash(checkpoint.as_bytes()).to_hex().to_string();
        let checkpoint = RawValue::from_string(checkpoint).map_err(internal)?;
        serde_json::to_string(&Document { blake3, checkpoint }).map_err(internal)
    }

    /// The name of the job.
    pub fn job(&self) -> &str {
        &self.contents.job
    }

    /// The id of the job.
    pub fn job_id(&self) -> u64 {
        self.contents.job_id
    }

    /// The version that was saved.
    pub fn version(&self) -> LineVersion {
        LineVersion { version: self.contents.version, line: self.contents.line }
    }

    /// Returns the line of this version, with the batches that it skips.
    ///
    /// # Errors
    /// [`Error::Invalid`] as for [`Line::new`].
    pub fn line(&self) -> Result<Line> {
        read_line(self.contents.line, &self.contents.skips)
    }

    /// Returns the figures of the steps before the version.
    ///
    /// # Errors
    /// [`Error::Invalid`] as for [`RecentSteps::validate`].
    pub fn recent(&self) -> Result<RecentSteps> {
        let recent = self.contents.recent.clone();
        recent.map_or_else(|| Ok(RecentSteps::default()), TryInto::try_into)
    }

    /// The number of the save.
    pub fn save(&self) -> u64 {
        self.contents.save
    }

    /// When the checkpoint was completed, in seconds since 1970.
    pub fn created(&self) -> u64 {
        self.contents.created
    }

    /// The specification of the job.
    pub fn spec(&self) -> &JobSpec {
        &self.spec
    }

    /// The size of all files but the manifest, in bytes.
    pub fn bytes(&self) -> u64 {
        self.contents.files.iter().fold(0, |sum, file| sum.saturating_add(file.bytes))
    }

    /// The names and sizes of the files.
    pub fn files(&self) -> impl Iterator<Item = (&str, u64)> {
        self.contents.files.iter().map(|file| (file.name.as_str(), file.bytes))
    }

    /// The ranks that have stored data, ascending.
    pub fn ranks(&self) -> Vec<u32> {
        let ranks = self.contents.files.iter().flat_map(|file| &file.ranks);
        let mut ranks: Vec<u32> = ranks.map(|entry| entry.rank).collect();
        ranks.sort_unstable();
        ranks
    }

    /// The ranks whose data was lost before the save.
    pub fn lost_ranks(&self) -> &[u32] {
        &self.contents.lost_ranks
    }

    /// The files.
    pub(crate) fn entries(&self) -> &[File] {
        &self.contents.files
    }

    /// The file with a slice, its entry there, and the offset of its first byte in the file.
    pub(crate) fn place(&self, slice: u32) -> Option<(&File, &SliceEntry, u64)> {
        let &Place { file, position, start } = self.places.get(slice as usize)?;
        let file = self.contents.files.get(file)?;
        Some((file, file.slices.get(position)?, start))
    }

    /// Returns whether another checkpoint has the same values, optimizer state and applied steps.
    pub fn has_state_of(&self, other: &Self) -> bool {
        let entry = |of: &Self, slice| of.place(slice).map(|(_, entry, _)| entry.clone());
        let mut slices = 0..self.places.len() as u32;
        self.difference(&other.spec).is_none()
            && slices.all(|slice| entry(self, slice) == entry(other, slice))
    }

    /// The first reason for which a job with this specification cannot start from the checkpoint.
    /// Tensors and the kind of their optimizers must be equal. So must the names of the averages,
    /// unless one of both has none: averages that the checkpoint does not have begin with the job.
    /// Hyperparameters, parameter groups, layouts, the number of ranks and of servers may differ.
    pub fn difference(&self, spec: &JobSpec) -> Option<String> {
        let (ours, theirs) = (self.spec.manifest.tensors(), spec.manifest.tensors());
        if ours.len() != theirs.len() {
            return Some(format!("number of tensors ({} and {})", ours.len(), theirs.len()));
        }
        let differs = ours.iter().zip(theirs).find(|(a, b)| {
            (&a.name, &a.shape, a.dtype, a.frozen, a.buffer, &a.alias_of, a.policy)
                != (&b.name, &b.shape, b.dtype, b.frozen, b.buffer, &b.alias_of, b.policy)
        });
        if let Some((tensor, _)) = differs {
            return Some(format!("tensor {:?}", tensor.name));
        }
        let optimizers = |tensor| self.spec.optimizer_of(tensor).zip(spec.optimizer_of(tensor));
        let tensor = (0..ours.len()).find(|&tensor| {
            optimizers(tensor).is_some_and(|(own, other)| !own.same_state_layout(other))
        });
        if let Some(tensor) = tensor {
            return Some(format!("optimizer of tensor {:?}", ours[tensor].name));
        }
        let (saved, wanted) = (self.spec.average_names(), spec.average_names());
        if saved.is_empty() || wanted.is_empty() || saved == wanted {
            return None;
        }
        Some(format!("set of averages ({} instead of {})", saved.join(", "), wanted.join(", ")))
    }
}

/// Checks that each slice is in exactly one file. The cost is bounded by the number of slices in
/// the files, because a few bytes can describe a job with millions of slices.
fn check_complete(files: &[File], slices: usize) -> Result<(), String> {
    let mut found = BTreeSet::new();
    for entry in files.iter().flat_map(|file| &file.slices) {
        if entry.slice as usize >= slices {
            return Err(format!("slice {} does not exist", entry.slice));
        }
        if !found.insert(entry.slice) {
            return Err(format!("slice {} is there twice", entry.slice));
        }
    }
    match (0..slices as u32).find(|slice| !found.contains(slice)) {
        Some(slice) => Err(format!("slice {slice} is missing")),
        None => Ok(()),
    }
}

impl File {
    fn of_message(file: pb::CheckpointFile, spec: &JobSpec) -> Result<Self> {
        let pb::CheckpointFile { name, bytes, header_hash, tensor_hashes, slices, ranks } = file;
        let hashes = tensor_hashes.iter().map(|hash| hash::of_message(hash));
        let mut hashes = hashes.collect::<Result<Vec<_>>>()?.into_iter();
        let slices = slices.into_iter().map(|saved| SliceEntry {
            slice: saved.slice,
            applied: saved.applied,
            scalar_state: saved.scalar_state.into_iter().map(f64::from).collect(),
            averaged: saved.averaged,
            hashes: hashes.by_ref().take(number_of_parts(spec, saved.slice)).collect(),
        });
        let slices = slices.collect();
        let ranks = ranks.into_iter().zip(hashes).map(|(saved, hash)| {
            let pb::SavedRank { rank, bytes } = saved;
            RankEntry { rank, bytes, hash }
        });
        let ranks = ranks.collect();
        Ok(Self { name, bytes, header: hash::of_message(&header_hash)?, slices, ranks })
    }

    /// Checks the name, the number of hashes, and that the sizes fit together. The slices exist.
    /// Returns the size of the header with its length.
    fn check(&self, spec: &JobSpec) -> Result<u64, String> {
        let name = &self.name;
        if name.is_empty() || name.contains('/') || name == ".." {
            return Err(format!("{name:?} is not the name of a file"));
        }
        for entry in &self.slices {
            let expected = number_of_parts(spec, entry.slice);
            if entry.hashes.len() != expected {
                let found = entry.hashes.len();
                return Err(format!(
                    "slice {} in {name} has {found} parts instead of {expected}",
                    entry.slice
                ));
            }
            entry.applied(spec).map_err(|error| error.to_string())?;
        }
        let content: u64 = self.sizes(spec).fold(0, u64::saturating_add);
        match self.bytes.checked_sub(content) {
            Some(header) if header >= 8 => Ok(header),
            _ => Err(format!("{name} has {} bytes, and {content} bytes of tensors", self.bytes)),
        }
    }

    /// The sizes of all tensors in the file, in order. The slices exist.
    pub(crate) fn sizes(&self, spec: &JobSpec) -> impl Iterator<Item = u64> {
        let parts = self.slices.iter().flat_map(|entry| format::parts(spec, entry.slice as usize));
        let slices = parts.map(|(_, part)| part.bytes as u64);
        slices.chain(self.ranks.iter().map(|entry| entry.bytes))
    }

    /// The hashes of all tensors in the file, in order.
    pub(crate) fn hashes(&self) -> impl Iterator<Item = &Hash> {
        let slices = self.slices.iter().flat_map(|entry| &entry.hashes);
        slices.chain(self.ranks.iter().map(|entry| &entry.hash))
    }

    /// The size of the header with its length.
    pub(crate) fn header_bytes(&self, spec: &JobSpec) -> u64 {
        self.bytes.saturating_sub(self.sizes(spec).fold(0, u64::saturating_add))
    }
}

impl SliceEntry {
    /// The steps applied to the slice.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the optimizer has another scalar state.
    pub(crate) fn applied(&self, spec: &JobSpec) -> Result<AppliedSteps> {
        let scalar_state: Vec<f32> = self.scalar_state.iter().map(|&value| value as f32).collect();
        let tensor = spec.manifest.slices()[self.slice as usize].tensor;
        let applied = spec.applied_to(tensor, self.applied, &scalar_state)?;
        Ok(AppliedSteps { averaged: self.averaged, ..applied })
    }
}

/// The number of parts of a slice; 0 for a slice that the job does not have.
fn number_of_parts(spec: &JobSpec, slice: u32) -> usize {
    match (slice as usize) < spec.manifest.number_of_slices() {
        true => format::parts(spec, slice as usize).len(),
        false => 0,
    }
}
