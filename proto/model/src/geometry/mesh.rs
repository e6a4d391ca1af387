//! Ranks in a multi-dimensional array with named dimensions.

use crate::{
    Error, Result,
    limits::{MAX_MESH_DIMS, MAX_NAME, MAX_WORLD},
    name::check_name,
};

/// Ranks in a row-major array whose dimensions have names ("dp", "tp", ...).
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ProcessMesh {
    /// INVARIANT: the product is the number of ranks; at least one dimension, none of size 0.
    shape: Vec<usize>,
    /// INVARIANT: distinct, one for each dimension.
    names: Vec<String>,
    /// INVARIANT: distinct.
    ranks: Vec<u32>,
    /// INVARIANT: the positions in `ranks`, in ascending order of the ranks.
    by_rank: Vec<u32>,
}

impl ProcessMesh {
    /// Arranges `ranks` row-major in an array of `shape`.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the mesh has no dimension or more than [`MAX_MESH_DIMS`], if the
    /// number of names or ranks does not match the shape, or if a name or rank is repeated.
    pub fn new<N: Into<String>>(
        shape: impl Into<Vec<usize>>,
        ranks: impl Into<Vec<u32>>,
        names: impl IntoIterator<Item = N>,
    ) -> Result<Self> {
        let (shape, ranks) = (shape.into(), ranks.into());
        // One name too many is enough to refuse the list.
        let names: Vec<String> =
            names.into_iter().take(MAX_MESH_DIMS + 1).map(Into::into).collect();
        check_shape(&shape, ranks.len())?;
        check_names(&names, shape.len())?;
        let mut by_rank: Vec<u32> = (0..).take(ranks.len()).collect();
        by_rank.sort_unstable_by_key(|&position| ranks[position as usize]);
        let rank_at = |position: u32| ranks[position as usize];
        if let Some(twice) = by_rank.windows(2).find(|pair| rank_at(pair[0]) == rank_at(pair[1])) {
            let rank = rank_at(twice[0]);
            return Err(Error::refused(format!("the mesh has rank {rank} more than once")));
        }
        Ok(Self { shape, names, ranks, by_rank })
    }

    /// Arranges ranks 0, 1, ... row-major.
    ///
    /// # Errors
    /// Those of [`Self::new`].
    pub fn dense<N: Into<String>>(
        shape: impl Into<Vec<usize>>,
        names: impl IntoIterator<Item = N>,
    ) -> Result<Self> {
        let shape = shape.into();
        let size = shape
            .iter()
            .try_fold(1u32, |product, &size| product.checked_mul(u32::try_from(size).ok()?));
        let size = size.filter(|&size| size <= MAX_WORLD).unwrap_or(0);
        Self::new(shape, (0..size).collect::<Vec<_>>(), names)
    }

    /// Size of each dimension.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Name of each dimension.
    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// All ranks, row-major.
    pub fn ranks(&self) -> &[u32] {
        &self.ranks
    }

    /// Number of dimensions.
    pub fn ndim(&self) -> usize {
        self.shape.len()
    }

    /// Number of ranks.
    pub fn size(&self) -> usize {
        self.ranks.len()
    }

    /// The dimension with this name.
    ///
    /// # Errors
    /// [`Error::Refused`] if the mesh has no such dimension.
    pub fn dim(&self, name: &str) -> Result<usize> {
        self.names.iter().position(|other| other == name).ok_or_else(|| {
            let names = self.names.join(", ");
            Error::refused(format!(
                "the mesh has no dimension {name:?}; its dimensions are {names}"
            ))
        })
    }

    /// The coordinates of `rank`, if it is in the mesh.
    pub fn coordinate(&self, rank: u32) -> Option<Vec<usize>> {
        Some(self.coordinate_of(self.position(rank)?))
    }

    /// The position of `rank` in [`Self::ranks`], if it is in the mesh.
    fn position(&self, rank: u32) -> Option<usize> {
        let rank_at = |&position: &u32| self.ranks[position as usize];
        let found = self.by_rank.binary_search_by_key(&rank, rank_at).ok()?;
        Some(self.by_rank[found] as usize)
    }

    fn coordinate_of(&self, mut position: usize) -> Vec<usize> {
        let mut coordinate = vec![0; self.ndim()];
        for (place, &size) in coordinate.iter_mut().zip(&self.shape).rev() {
            *place = position % size;
            position /= size;
        }
        coordinate
    }

    /// All ranks with their coordinates, row-major.
    pub fn coordinates(&self) -> impl Iterator<Item = (Vec<usize>, u32)> + '_ {
        self.ranks.iter().enumerate().map(|(position, &rank)| (self.coordinate_of(position), rank))
    }

    /// The rank at `coordinate`; `None` outside the mesh.
    pub fn rank_at(&self, coordinate: &[usize]) -> Option<u32> {
        if coordinate.len() != self.ndim()
            || coordinate.iter().zip(&self.shape).any(|(place, size)| place >= size)
        {
            return None;
        }
        let position =
            coordinate.iter().zip(&self.shape).fold(0, |sum, (place, size)| sum * size + place);
        Some(self.ranks[position])
    }

    /// The ranks along dimension `dim` that include `rank`, in order; `None` if the mesh does not
    /// have the rank or the dimension.
    pub fn group(&self, rank: u32, dim: usize) -> Option<Vec<u32>> {
        let mut coordinate = self.coordinate(rank)?;
        let size = *self.shape.get(dim)?;
        let along = (0..size).map(|place| {
            coordinate[dim] = place;
            self.rank_at(&coordinate).expect("it is within the shape")
        });
        Some(along.collect())
    }

    /// The mesh of `dims`, in that order, that includes `rank`.
    ///
    /// # Errors
    /// [`Error::Invalid`] for an unknown or repeated dimension, or a rank that is not in the mesh.
    pub fn sub_mesh(&self, dims: &[usize], rank: u32) -> Result<Self> {
        let Some(mut coordinate) = self.coordinate(rank) else {
            let size = self.size();
            return Err(Error::refused(format!(
                "rank {rank} is not one of the mesh's {size} ranks"
            )));
        };
        let mut seen = [false; MAX_MESH_DIMS];
        for &dim in dims {
            if dim >= self.ndim() {
                let expected = format!("less than the number of dimensions, {}", self.ndim());
                return Err(Error::invalid("dimension of a mesh", dim, expected));
            }
            if std::mem::replace(&mut seen[dim], true) {
                return Err(Error::refused(format!("the sub-mesh lists dimension {dim} twice")));
            }
        }
        let shape: Vec<usize> = dims.iter().map(|&dim| self.shape[dim]).collect();
        let mut ranks = Vec::with_capacity(shape.iter().product());
        for position in 0..shape.iter().product() {
            let mut rest = position;
            for (&dim, &size) in dims.iter().zip(&shape).rev() {
                coordinate[dim] = rest % size;
                rest /= size;
            }
            ranks.push(self.rank_at(&coordinate).expect("it is within the shape"));
        }
        Self::new(shape, ranks, dims.iter().map(|&dim| self.names[dim].clone()))
    }

    /// Describes a rank with its coordinates, such as "rank 3 (dp 1, tp 1)".
    pub fn describe(&self, rank: u32) -> String {
        match self.coordinate(rank) {
            None => format!("rank {rank}"),
            Some(coordinate) => {
                let places: Vec<String> = self
                    .names
                    .iter()
                    .zip(coordinate)
                    .map(|(name, place)| format!("{name} {place}"))
                    .collect();
                format!("rank {rank} ({})", places.join(", "))
            }
        }
    }
}

/// Checks that a mesh of `shape` can have this number of ranks.
fn check_shape(shape: &[usize], ranks: usize) -> Result<()> {
    if !(1..=MAX_MESH_DIMS).contains(&shape.len()) {
        let expected = format!("1 to {MAX_MESH_DIMS}");
        return Err(Error::invalid("number of dimensions of a mesh", shape.len(), expected));
    }
    let size = shape.iter().try_fold(1usize, |product, &size| product.checked_mul(size));
    if size != Some(ranks) || !(1..=MAX_WORLD as usize).contains(&ranks) {
        return Err(Error::refused(format!(
            "a mesh of shape {shape:?} cannot have {ranks} ranks; the product of its sizes must be \
             the number of ranks, 1 to {MAX_WORLD}"
        )));
    }
    Ok(())
}

/// Checks that a mesh with `dims` dimensions can have these names.
fn check_names(names: &[String], dims: usize) -> Result<()> {
    if names.len() != dims {
        return Err(Error::refused(format!(
            "a mesh of {dims} dimensions cannot have the names {names:?}; name each dimension once"
        )));
    }
    for (index, name) in names.iter().enumerate() {
        check_name("a dimension name of a mesh", name, MAX_NAME)?;
        if names[..index].contains(name) {
            return Err(Error::refused(format!("the mesh has two dimensions named {name:?}")));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn mesh() -> ProcessMesh {
        ProcessMesh::new([2, 3], [5, 4, 3, 2, 1, 0], ["dp", "tp"]).unwrap()
    }

    #[test]
    fn a_rank_has_a_coordinate_and_groups() {
        let mesh = mesh();
        assert_eq!(mesh.coordinate(1), Some(vec![1, 1]));
        assert_eq!(mesh.rank_at(&[1, 1]), Some(1));
        assert_eq!(mesh.rank_at(&[2, 0]), None);
        assert_eq!(mesh.coordinate(6), None);
        assert_eq!(mesh.group(1, 0), Some(vec![4, 1]));
        assert_eq!(mesh.group(1, 1), Some(vec![2, 1, 0]));
        assert_eq!(mesh.group(1, 2), None);
        assert_eq!(mesh.describe(1), "rank 1 (dp 1, tp 1)");
    }

    #[test]
    fn a_sub_mesh_has_its_dimensions_in_the_requested_order() {
        let mesh = mesh();
        let tp = ProcessMesh::new([3], [2, 1, 0], ["tp"]).unwrap();
        assert_eq!(mesh.sub_mesh(&[1], 0).unwrap(), tp);
        let turned = ProcessMesh::new([3, 2], [5, 2, 4, 1, 3, 0], ["tp", "dp"]).unwrap();
        assert_eq!(mesh.sub_mesh(&[1, 0], 0).unwrap(), turned);
        assert!(mesh.sub_mesh(&[2], 0).is_err() && mesh.sub_mesh(&[0, 0], 0).is_err());
        assert!(mesh.sub_mesh(&[0], 6).is_err() && mesh.sub_mesh(&[], 0).is_err());
    }

    // promise: invalid-input
    #[test]
    fn an_invalid_mesh_is_refused() {
        let refused = |shape: &[usize], ranks: &[u32], names: &[&str]| {
            ProcessMesh::new(shape, ranks, names.iter().copied()).is_err()
        };
        assert!(refused(&[], &[0], &[]) && refused(&[0], &[], &["x"]));
        assert!(refused(&[2], &[0], &["x"]) && refused(&[2], &[0, 0], &["x"]));
        assert!(
            refused(&[1, 1], &[0], &["x"])
                && refused(&[1, 1], &[0], &["x", "x"])
                && refused(&[1], &[0], &[""])
        );
        assert!(ProcessMesh::dense([usize::MAX, 2], ["x", "y"]).is_err());
        assert!(mesh().dim("pp").is_err() && mesh().dim("tp") == Ok(1));
    }

    #[test]
    fn more_dimensions_than_the_limit_are_refused_before_their_names_are_compared() {
        let what = |shape: Vec<usize>, names: usize| {
            let names = (0..names).map(|dim| format!("a long name of dimension {dim}"));
            match ProcessMesh::new(shape, [0], names) {
                Err(Error::Invalid { what, expected, .. }) => (what, expected),
                Err(Error::Refused { sentence }) => (sentence, String::new()),
                other => panic!("{other:?}"),
            }
        };
        let dims = ("number of dimensions of a mesh".to_owned(), format!("1 to {MAX_MESH_DIMS}"));
        assert_eq!(what(vec![1; MAX_MESH_DIMS + 1], MAX_MESH_DIMS + 1), dims);
        assert_eq!(what(vec![1; 40_000], 40_000), dims);
        let names = what(vec![1; 2], 40_000).0;
        assert!(names.starts_with("a mesh of 2 dimensions cannot have the names ["), "{names}");
        let names = || (0..MAX_MESH_DIMS).map(|dim| format!("d{dim}"));
        assert!(ProcessMesh::new(vec![1; MAX_MESH_DIMS], [0], names()).is_ok());
    }

    #[test]
    fn unneeded_names_are_not_read() {
        let mut read = 0;
        let names = (0..40_000).map(|dim| {
            read += 1;
            dim.to_string()
        });
        assert!(ProcessMesh::new([1, 1], [0], names).is_err());
        assert_eq!(read, MAX_MESH_DIMS + 1);
    }

    proptest! {
        #[test]
        fn every_rank_has_its_coordinates(ranks in Just((0..24u32).map(|i| 3 * i).collect::<Vec<_>>()).prop_shuffle()) {
            let mesh = ProcessMesh::new([2, 3, 4], ranks.clone(), ["a", "b", "c"]).unwrap();
            for (coordinate, rank) in mesh.coordinates() {
                prop_assert_eq!(mesh.coordinate(rank), Some(coordinate));
                prop_assert_eq!(mesh.coordinate(rank + 1), None);
            }
        }
    }
}
