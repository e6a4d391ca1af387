//! The job's ordered tensors, and the slices that follow from them.
//!
//! Slices depend on the manifest alone: neither the number of servers nor any other setting moves a
//! boundary.

use std::{collections::HashMap, ops::Range, sync::OnceLock};

use crate::{
    DType, Error, Result, TensorLayout,
    geometry::{SliceSpec, blocks::SLICE},
    limits::{MAX_ELEMENTS, MAX_NAME, MAX_TENSOR_DIMS, MAX_TENSORS},
    name::check_name,
};

/// How a tensor is split into slices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Policy {
    /// Every [`SLICE`] elements form a slice.
    #[default]
    Elementwise,
    /// The tensor is one slice, because the optimizer needs the whole tensor at once.
    Whole,
}

/// One tensor of the manifest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorSpec {
    /// The name, unique in the manifest.
    pub name: String,
    /// The dimensions, row-major; empty for a scalar.
    pub shape: Vec<u64>,
    /// The dtype in which parameters are published. Master weights are always f32.
    pub dtype: DType,
    /// The tensor is pulled but never pushed, and has no optimizer state.
    pub frozen: bool,
    /// The tensor is not a parameter (such as batch-norm statistics): it takes no gradient, and its
    /// content may be replaced with each step.
    pub buffer: bool,
    /// The earlier tensor with which this tensor shares its storage, if it is tied.
    pub alias_of: Option<String>,
    /// The parameter group.
    pub group: u32,
    /// How the tensor is split into slices.
    pub policy: Policy,
    /// The tensor does not count in the global norm, and the clip coefficient does not scale it.
    pub no_clip: bool,
    /// How the gradient and the initial values are distributed over the ranks. `None`: each rank
    /// has the whole gradient, the servers take the mean, and rank 0 uploads the initial values.
    pub layout: Option<TensorLayout>,
    /// The only rank that may push new values with a step. `None`: the ranks that upload the
    /// initial values.
    pub replaced_by: Option<u32>,
}

impl TensorSpec {
    /// A trainable f32 tensor in group 0.
    pub fn new(name: impl Into<String>, shape: impl Into<Vec<u64>>) -> Self {
        Self {
            name: name.into(),
            shape: shape.into(),
            dtype: DType::F32,
            frozen: false,
            buffer: false,
            alias_of: None,
            group: 0,
            policy: Policy::Elementwise,
            no_clip: false,
            layout: None,
            replaced_by: None,
        }
    }

    /// The number of elements; 1 for a scalar.
    pub fn numel(&self) -> u64 {
        self.shape.iter().product()
    }

    /// Returns whether the tensor takes gradients of its own.
    pub fn trains(&self) -> bool {
        !self.frozen && !self.buffer && self.alias_of.is_none()
    }
}

/// A tensor of a manifest. [`Manifest::find`] returns the one with a given name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TensorId(usize);

impl TensorId {
    /// The tensor at a position in the manifest. Methods that receive it check the position.
    pub const fn new(index: usize) -> Self {
        Self(index)
    }

    /// The position in the manifest.
    pub const fn index(self) -> usize {
        self.0
    }
}

/// The job's tensors, in order, and their slices.
#[derive(Debug, Clone)]
pub struct Manifest {
    tensors: Vec<TensorSpec>,
    /// INVARIANT: for each tensor the tensor that owns its storage, which is the tensor itself
    /// unless it is tied.
    owners: Vec<usize>,
    /// INVARIANT: `slices[first[t]..first[t + 1]]` are the slices of tensor t; tied and empty
    /// tensors have none.
    first: Vec<usize>,
    /// The number of parameters.
    parameters: u64,
    /// Computed on first use. A message of a few bytes can describe millions of slices, and may be
    /// refused for another reason.
    slices: OnceLock<Vec<SliceSpec>>,
}

/// The other fields follow from the tensors.
impl PartialEq for Manifest {
    fn eq(&self, other: &Self) -> bool {
        self.tensors == other.tensors
    }
}

impl Eq for Manifest {}

impl Manifest {
    /// Checks the tensors.
    ///
    /// # Errors
    /// [`Error::Invalid`], which names the tensor, for a name that is empty, too long or not
    /// unique; a shape that overflows or has too many dimensions; an alias that is not an earlier
    /// tensor with storage of its own and with the same shape; and for more than [`MAX_TENSORS`]
    /// tensors.
    pub fn new(tensors: Vec<TensorSpec>) -> Result<Self> {
        check_number_of_tensors(tensors.len())?;
        let mut names = HashMap::with_capacity(tensors.len());
        let mut owners = Vec::with_capacity(tensors.len());
        let mut total = 0u64;
        for (index, tensor) in tensors.iter().enumerate() {
            check_name(&format!("name of tensor {index}"), &tensor.name, MAX_NAME)?;
            total = checked_total(total, tensor)?;
            owners.push(match &tensor.alias_of {
                None => index,
                Some(alias) => owner_of(&tensors, &names, tensor, alias)?,
            });
            if let Some(first) = names.insert(tensor.name.as_str(), index) {
                let name = &tensor.name;
                return Err(Error::refused(format!(
                    "tensors {first} and {index} have the same name, {name:?}"
                )));
            }
        }
        let mut first = Vec::with_capacity(tensors.len() + 1);
        first.push(0);
        first.extend(tensors.iter().scan(0, |slices, tensor| {
            *slices += number_of_slices(tensor);
            Some(*slices)
        }));
        let owned = tensors.iter().filter(|t| t.alias_of.is_none() && !t.buffer);
        let parameters = owned.map(TensorSpec::numel).sum();
        Ok(Self { tensors, owners, first, parameters, slices: OnceLock::new() })
    }

    /// The tensor with this name. The search takes time proportional to the number of tensors, so
    /// keep the result.
    ///
    /// # Errors
    /// [`Error::Refused`] if no tensor has the name.
    pub fn find(&self, name: &str) -> Result<TensorId> {
        let index = self.tensors.iter().position(|tensor| tensor.name == name);
        index.map(TensorId).ok_or_else(|| Error::refused(format!("the job has no tensor {name:?}")))
    }

    /// The tensors, in order.
    pub fn tensors(&self) -> &[TensorSpec] {
        &self.tensors
    }

    /// All slices, in manifest order. The number of a slice is its position.
    pub fn slices(&self) -> &[SliceSpec] {
        self.slices.get_or_init(|| {
            let cut = self
                .tensors
                .iter()
                .enumerate()
                .flat_map(|(index, tensor)| slices_of(index, tensor));
            cut.collect()
        })
    }

    /// The number of slices.
    pub fn number_of_slices(&self) -> usize {
        self.first[self.tensors.len()]
    }

    /// The tensor whose storage `tensor` uses: itself, unless it is tied.
    pub fn owner(&self, tensor: usize) -> usize {
        self.owners[tensor]
    }

    /// The numbers of the slices that hold `tensor` (those of its owner if it is tied).
    pub fn slices_of(&self, tensor: usize) -> Range<usize> {
        let owner = self.owners[tensor];
        self.first[owner]..self.first[owner + 1]
    }

    /// The tensor that contains slice number `slice`.
    pub fn tensor_of(&self, slice: usize) -> &TensorSpec {
        &self.tensors[self.slices()[slice].tensor]
    }

    /// Returns whether slice number `slice` takes gradients.
    pub fn trains(&self, slice: usize) -> bool {
        self.tensor_of(slice).trains()
    }

    /// The number of parameters. Tied parameters count once, and buffers do not count.
    pub fn parameters(&self) -> u64 {
        self.parameters
    }
}

/// Checks the number of tensors.
///
/// # Errors
/// [`Error::Invalid`] for more than [`MAX_TENSORS`].
pub fn check_number_of_tensors(number: usize) -> Result<()> {
    if number > MAX_TENSORS {
        return Err(Error::invalid("number of tensors", number, format!("at most {MAX_TENSORS}")));
    }
    Ok(())
}

fn checked_total(total: u64, tensor: &TensorSpec) -> Result<u64> {
    if tensor.shape.len() > MAX_TENSOR_DIMS {
        return Err(Error::invalid(
            format!("number of dimensions of tensor {:?}", tensor.name),
            tensor.shape.len(),
            format!("at most {MAX_TENSOR_DIMS}"),
        ));
    }
    let numel = tensor.shape.iter().try_fold(1u64, |product, &d| product.checked_mul(d));
    let sum = numel.and_then(|numel| total.checked_add(numel));
    sum.filter(|&sum| sum <= MAX_ELEMENTS).ok_or_else(|| {
        Error::invalid(
            format!("shape of tensor {:?}", tensor.name),
            format!("{:?}", tensor.shape),
            format!("small enough that the job has at most {MAX_ELEMENTS} elements"),
        )
    })
}

fn owner_of(
    tensors: &[TensorSpec],
    earlier: &HashMap<&str, usize>,
    tensor: &TensorSpec,
    alias: &str,
) -> Result<usize> {
    let TensorSpec { name, shape, dtype, .. } = tensor;
    let owner = *earlier.get(alias).ok_or_else(|| {
        let what = format!("alias_of of tensor {name:?}");
        Error::invalid(what, format_args!("{alias:?}"), "the name of an earlier tensor")
    })?;
    let spec = &tensors[owner];
    if let Some(own) = &spec.alias_of {
        return Err(Error::refused(format!(
            "tensor {name:?} is an alias of {alias:?}, which is an alias itself; make it \
             an alias of {own:?}"
        )));
    }
    if spec.shape != *shape || spec.dtype != *dtype {
        return Err(Error::refused(format!(
            "tensor {name:?} of shape {shape:?} and dtype {dtype} cannot be an alias of {alias:?} \
             of shape {:?} and dtype {}",
            spec.shape, spec.dtype
        )));
    }
    Ok(owner)
}

/// The number of elements of each slice of a tensor, except a shorter last slice.
pub(crate) fn slice_numel(tensor: &TensorSpec) -> usize {
    match tensor.policy {
        Policy::Elementwise => SLICE,
        Policy::Whole => (tensor.numel() as usize).max(1),
    }
}

/// The number of slices of a tensor: none if it is tied or empty.
pub(crate) fn number_of_slices(tensor: &TensorSpec) -> usize {
    match tensor.alias_of {
        Some(_) => 0,
        None => (tensor.numel() as usize).div_ceil(slice_numel(tensor)),
    }
}

/// The slices of tensor number `index`.
fn slices_of(index: usize, tensor: &TensorSpec) -> impl Iterator<Item = SliceSpec> {
    let (numel, step) = (tensor.numel() as usize, slice_numel(tensor));
    (0..number_of_slices(tensor)).map(move |slice| {
        let offset = slice * step;
        SliceSpec { tensor: index, offset, numel: step.min(numel - offset) }
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn tied(name: &str, shape: &[u64], owner: &str) -> TensorSpec {
        TensorSpec { alias_of: Some(owner.into()), ..TensorSpec::new(name, shape) }
    }

    fn refused(tensors: Vec<TensorSpec>) -> String {
        match Manifest::new(tensors) {
            Err(Error::Invalid { what, .. }) => what,
            Err(Error::Refused { sentence }) => sentence,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_tensor_is_found_by_its_name() {
        let tensors = ["weight", "bias"].map(|name| TensorSpec::new(name, [4]));
        let manifest = Manifest::new(tensors.into()).unwrap();
        assert_eq!(manifest.find("bias"), Ok(TensorId::new(1)));
        let unknown = Error::refused("the job has no tensor \"head\"");
        assert_eq!(manifest.find("head"), Err(unknown));
    }

    #[test]
    fn a_tied_tensor_has_its_owners_slices() {
        let manifest = Manifest::new(vec![
            TensorSpec::new("embedding", [10, 4]),
            TensorSpec::new("empty", [0, 4]),
            tied("head", &[10, 4], "embedding"),
            TensorSpec::new("scalar", []),
        ])
        .unwrap();
        assert_eq!(manifest.slices_of(2), 0..1);
        assert_eq!(manifest.slices_of(1), 1..1);
        assert_eq!(manifest.slices_of(3), 1..2);
        assert_eq!(manifest.parameters(), 41);
    }

    #[test]
    fn whole_tensors_are_not_split() {
        let big = [3 * SLICE as u64 + 1];
        let whole = TensorSpec { policy: Policy::Whole, ..TensorSpec::new("a", big) };
        let manifest = Manifest::new(vec![whole, TensorSpec::new("b", big)]).unwrap();
        assert_eq!(manifest.slices_of(0).len(), 1);
        assert_eq!(manifest.slices_of(1).len(), 4);
    }

    #[test]
    fn wrong_manifests_are_refused_by_name() {
        let a = || TensorSpec::new("a", [2]);
        assert_eq!(refused(vec![a(), a()]), "tensors 0 and 1 have the same name, \"a\"");
        assert_eq!(refused(vec![TensorSpec::new("", [2])]), "name of tensor 0");
        assert_eq!(refused(vec![tied("b", &[2], "a"), a()]), "alias_of of tensor \"b\"");
        assert_eq!(
            refused(vec![a(), tied("b", &[3], "a")]),
            "tensor \"b\" of shape [3] and dtype f32 cannot be an alias of \"a\" of shape [2] and \
             dtype f32"
        );
        let chain = vec![a(), tied("b", &[2], "a"), tied("c", &[2], "b")];
        assert_eq!(
            refused(chain),
            "tensor \"c\" is an alias of \"b\", which is an alias itself; make it an alias of \"a\""
        );
        let huge = TensorSpec::new("h", [u64::MAX, 2]);
        assert_eq!(refused(vec![huge]), "shape of tensor \"h\"");
    }

    #[test]
    fn tensors_of_too_many_dimensions_and_names_that_are_too_long_are_refused() {
        let many = TensorSpec::new("w", vec![1; MAX_TENSOR_DIMS + 1]);
        assert_eq!(refused(vec![many]), "number of dimensions of tensor \"w\"");
        assert!(Manifest::new(vec![TensorSpec::new("w", vec![1; MAX_TENSOR_DIMS])]).is_ok());
        assert_eq!(
            refused(vec![TensorSpec::new("w".repeat(MAX_NAME + 1), [1])]),
            "name of tensor 0"
        );
        let number = check_number_of_tensors(MAX_TENSORS + 1).unwrap_err().to_string();
        assert!(number.contains(&MAX_TENSORS.to_string()), "{number}");
    }

    #[test]
    fn slices_are_computed_on_first_use() {
        let manifest = Manifest::new(vec![TensorSpec::new("w", [MAX_ELEMENTS])]).unwrap();
        assert_eq!(manifest.number_of_slices(), MAX_ELEMENTS as usize / SLICE);
        assert_eq!(manifest.slices_of(0), 0..manifest.number_of_slices());
        assert!(manifest.slices.get().is_none());
    }

    proptest! {
        #[test]
        fn slices_cover_every_tensor_once(sizes in prop::collection::vec(0u64..20_000_000, 1..8)) {
            let specs = sizes.iter().enumerate().map(|(i, &n)| TensorSpec::new(format!("t{i}"), [n]));
            let manifest = Manifest::new(specs.collect()).unwrap();
            prop_assert_eq!(manifest.slices().len(), manifest.number_of_slices());
            for (tensor, &size) in sizes.iter().enumerate() {
                let mut end = 0;
                for slice in &manifest.slices()[manifest.slices_of(tensor)] {
                    prop_assert_eq!(slice.tensor, tensor);
                    prop_assert_eq!(slice.offset, end);
                    prop_assert!(slice.numel >= 1 && slice.numel <= SLICE);
                    end += slice.numel;
                }
                prop_assert_eq!(end as u64, size);
            }
        }
    }
}
