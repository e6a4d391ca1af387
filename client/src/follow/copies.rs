//! Full copies that a mirror sends.

use std::collections::BTreeMap;

use zeroshard_changes::{
    MirrorCopy,
    apply::{Place, apply},
};
use zeroshard_model::{Error, Result};
use zeroshard_proto::{pb, status::from_status};

use super::{
    Follower,
    apply::{Arrays, Copy, part},
    changes::malformed,
    mirror::Mirror,
};

impl Follower {
    /// Fetches all values from the mirror, whose newest version was `newest`. Slices arrive at
    /// different versions: those that are behind get the changes that they lack. Afterwards all
    /// hashes are those of the servers.
    pub(super) async fn copy_of_mirror(
        &self,
        (mirror, newest): (&Mirror, u64),
        arrays: &mut Arrays<'_>,
    ) -> Result<Copy> {
        let copy = MirrorCopy::new(self.receive(mirror, arrays).await?, newest);
        let version = copy.version();
        let failed = |cause: String| Error::Unavailable { peer: mirror.peer.clone(), cause };
        for (from, slices) in copy.behind() {
            let changes = self.changes_of_mirror(mirror, slices, [from, version]).await?;
            let gone = || failed(format!("it does not know the changes since version {from}"));
            for (slice, of) in changes.ok_or_else(gone)? {
                let spec = &self.of.spec.manifest.slices()[slice as usize];
                let array = arrays.get_mut(&spec.tensor);
                let Some((array, place)) = array.zip(self.views.place(spec)) else { continue };
                let (dtype, positions) = place;
                let place = Place { dtype, first: positions.start as u64 };
                apply(place, part(array, positions), &of.change)
                    .map_err(|error| malformed(slice, &error))?;
            }
        }
        let expected = self.hashes_of_servers(version).await?;
        let expected = expected.ok_or_else(|| {
            failed(format!("it is at version {version}, which the servers do not know any more"))
        })?;
        let hashes = self.hashes(arrays);
        match copy.differs(&hashes, &expected) {
            None => Ok((version, hashes)),
            Some(slice) => Err(failed(format!(
                "its values of slice {slice} at version {version} are not those of the servers"
            ))),
        }
    }

    /// Receives all slices. Returns their versions.
    async fn receive(
        &self,
        mirror: &Mirror,
        arrays: &mut Arrays<'_>,
    ) -> Result<BTreeMap<u32, u64>> {
        let request = pb::CopyRequest {
            job: self.of.spec.name.clone(),
            job_id: self.of.id,
            line: self.of.line,
            slices: self.by_dtype(self.slices()),
        };
        let failed = |status: tonic::Status| from_status(&status, &mirror.peer);
        let mut client = mirror.client(self.cluster.options.timeout);
        let mut call = client.copy(request).await.map_err(failed)?.into_inner();
        let (mut versions, mut filled) = (BTreeMap::new(), BTreeMap::<u32, usize>::new());
        while let Some(message) = call.message().await.map_err(failed)? {
            let pb::CopyResponse { slice, values, version } = message;
            let wrong = |cause: &str| Error::Internal {
                cause: format!("{} has sent {cause} of slice {slice}", mirror.peer),
            };
            let spec = self.of.spec.manifest.slices().get(slice as usize);
            let place = spec.and_then(|spec| {
                let (_, positions) = self.views.place(spec)?;
                Some((arrays.get_mut(&spec.tensor)?, positions))
            });
            let (array, positions) =
                place.ok_or_else(|| wrong("values that were not asked for,"))?;
            let array = part(array, positions);
            let at = filled.entry(slice).or_default();
            let end = *at + values.len();
            array
                .get_mut(*at..end)
                .ok_or_else(|| wrong("too many values"))?
                .copy_from_slice(&values);
            *at = end;
            if let Some(version) = version {
                if end < array.len() {
                    return Err(wrong("too few values"));
                }
                versions.insert(slice, version);
            }
        }
        match self.slices().find(|slice| !versions.contains_key(slice)) {
            None => Ok(versions),
            Some(slice) => {
                let cause = format!("{} has left out slice {slice}", mirror.peer);
                Err(Error::Internal { cause })
            }
        }
    }
}
