//! Reads and writes the parameters of a module, and their gradients, as flat arrays.

use std::collections::HashMap;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::container::TensorContainer;
use burn::tensor::{Tensor, TensorData};

use super::host::HostValues;

/// A float parameter of a module.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Parameter {
    pub(crate) id: ParamId,
    /// For example "blocks.0.up.weight".
    pub(crate) path: String,
    /// The shape of the part that this rank holds.
    pub(crate) shape: Vec<usize>,
    pub(crate) trains: bool,
}

impl Parameter {
    pub(crate) fn elements(&self) -> usize {
        self.shape.iter().product()
    }
}

/// The float parameters of a module, in the order of its fields. A parameter that several layers
/// share is listed once.
pub(crate) fn list<B: Backend, M: Module<B>>(module: &M) -> Vec<Parameter> {
    #[derive(Default)]
    struct Lister {
        path: Vec<String>,
        found: Vec<Parameter>,
    }
    impl<B: Backend> ModuleVisitor<B> for Lister {
        fn visit_float<const D: usize>(&mut self, parameter: &Param<Tensor<B, D>>) {
            if self.found.iter().any(|other| other.id == parameter.id) {
                return;
            }
            let tensor = parameter.val();
            self.found.push(Parameter {
                id: parameter.id,
                path: self.path.join("."),
                shape: tensor.dims().to_vec(),
                trains: tensor.is_require_grad(),
            });
        }
        fn enter_module(&mut self, name: &str, _: &str) {
            self.path.push(name.to_owned());
        }
        fn exit_module(&mut self, _: &str, _: &str) {
            self.path.pop();
        }
    }
    let mut lister = Lister::default();
    module.visit(&mut lister);
    lister.found
}

/// The values of a module's parameters.
pub(crate) fn read<B: Backend, M: Module<B>>(module: &M) -> HashMap<ParamId, Vec<f32>> {
    struct Reader(HashMap<ParamId, Vec<f32>>);
    impl<B: Backend> ModuleVisitor<B> for Reader {
        fn visit_float<const D: usize>(&mut self, parameter: &Param<Tensor<B, D>>) {
            self.0.entry(parameter.id).or_insert_with(|| values(parameter.val()));
        }
    }
    let mut reader = Reader(HashMap::new());
    module.visit(&mut reader);
    reader.0
}

/// Writes values into the parameters of a module. The other parameters are not changed. A parameter
/// that several layers share stays shared.
pub(crate) fn write<'a, B: Backend, M: Module<B>>(
    module: M,
    values: impl IntoIterator<Item = (&'a Parameter, Vec<f32>)>,
) -> M {
    struct Writer<'a> {
        values: HashMap<ParamId, (&'a Parameter, Vec<f32>)>,
        written: TensorContainer<ParamId>,
    }
    impl<B: Backend> ModuleMapper<B> for Writer<'_> {
        fn map_float<const D: usize>(
            &mut self,
            parameter: Param<Tensor<B, D>>,
        ) -> Param<Tensor<B, D>> {
            if let Some(shared) = self.written.get::<B>(&parameter.id) {
                return Param::initialized(parameter.id, Tensor::from_primitive(shared));
            }
            let Some((new, values)) = self.values.remove(&parameter.id) else { return parameter };
            let data = TensorData::new(values, new.shape.clone());
            let tensor =
                Tensor::from_data(data, &parameter.val().device()).set_require_grad(new.trains);
            self.written.register::<B>(parameter.id, tensor.clone().into_primitive());
            Param::initialized(parameter.id, tensor)
        }
    }
    let values =
        values.into_iter().map(|(parameter, values)| (parameter.id, (parameter, values))).collect();
    module.map(&mut Writer { values, written: TensorContainer::new() })
}

/// Frees the memory of all parameters by replacing them with tensors without elements.
pub(crate) fn free<B: Backend, M: Module<B>>(module: M) -> M {
    struct Emptier;
    impl<B: Backend> ModuleMapper<B> for Emptier {
        fn map_float<const D: usize>(
            &mut self,
            parameter: Param<Tensor<B, D>>,
        ) -> Param<Tensor<B, D>> {
            let data = TensorData::new(Vec::<f32>::new(), [0; D]);
            Param::initialized(parameter.id, Tensor::from_data(data, &parameter.val().device()))
        }
    }
    module.map(&mut Emptier)
}

/// The gradients of a module's parameters after a backward pass.
pub(crate) fn gradients<B: AutodiffBackend, M: Module<B>>(
    module: &M,
    gradients: &B::Gradients,
) -> HashMap<ParamId, HostValues> {
    struct Taker<'a, B: AutodiffBackend>(&'a B::Gradients, HashMap<ParamId, HostValues>);
    impl<B: AutodiffBackend> ModuleVisitor<B> for Taker<'_, B> {
        fn visit_float<const D: usize>(&mut self, parameter: &Param<Tensor<B, D>>) {
            if let Some(gradient) = parameter.val().grad(self.0) {
                self.1.insert(parameter.id, HostValues::of(gradient));
            }
        }
    }
    let mut taker = Taker::<B>(gradients, HashMap::new());
    module.visit(&mut taker);
    taker.1
}

/// Removes a module's gradients one by one, and calls `run` with each parameter's id and gradient
/// (`None`: the parameter has none). A gradient can be freed before the next one is read. Stops at
/// the first error of `run`.
pub(crate) fn drain<B: AutodiffBackend, M: Module<B>, E>(
    module: &M,
    gradients: &mut GradientsParams,
    run: impl FnMut(ParamId, Option<HostValues>) -> Result<(), E>,
) -> Result<(), E> {
    struct Drainer<'a, F, E> {
        gradients: &'a mut GradientsParams,
        run: F,
        result: Result<(), E>,
    }
    impl<B, F, E> ModuleVisitor<B> for Drainer<'_, F, E>
    where
        B: AutodiffBackend,
        F: FnMut(ParamId, Option<HostValues>) -> Result<(), E>,
    {
        fn visit_float<const D: usize>(&mut self, parameter: &Param<Tensor<B, D>>) {
            if self.result.is_ok() {
                let gradient = self.gradients.remove::<B::InnerBackend, D>(parameter.id);
                self.result = (self.run)(parameter.id, gradient.map(HostValues::of));
            }
        }
    }
    let mut drainer = Drainer { gradients, run, result: Ok(()) };
    module.visit(&mut drainer);
    drainer.result
}

/// Adds a gradient to a sum in f32. The order of the calls determines the bits.
pub fn accumulate(sum: &mut [f32], gradient: &[f32]) {
    sum.iter_mut().zip(gradient).for_each(|(sum, value)| *sum += value);
}

/// Converts gradients into the type that burn's optimizers accept.
pub(crate) fn for_optimizer<B: AutodiffBackend, M: Module<B>>(
    module: &M,
    gradients: HashMap<ParamId, HostValues>,
) -> GradientsParams {
    struct Giver(HashMap<ParamId, HostValues>, GradientsParams);
    impl<B: AutodiffBackend> ModuleVisitor<B> for Giver {
        fn visit_float<const D: usize>(&mut self, parameter: &Param<Tensor<B, D>>) {
            if let Some(values) = self.0.remove(&parameter.id) {
                let like = parameter.val();
                let tensor = Tensor::from_data(values.into_data(like.shape()), &like.device());
                self.1.register::<B::InnerBackend, D>(parameter.id, tensor);
            }
        }
    }
    let mut giver = Giver(gradients, GradientsParams::new());
    module.visit(&mut giver);
    giver.1
}

fn values<B: Backend, const D: usize>(tensor: Tensor<B, D>) -> Vec<f32> {
    tensor.into_data().convert::<f32>().into_vec().expect("the data was converted to f32")
}
