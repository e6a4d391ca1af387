//! Compares optimizer steps with [`super::reference`].

use std::sync::Arc;

use zeroshard_model::{
    dtype::DType,
    geometry::blocks::BLOCK,
    optimizer::{AppliedSteps, Optimizer, StateShape},
};

use super::{assert_same, buffer_of, contents, from_bytes, numbers, reference, to_bytes};
use crate::{Backend, Output, Update};

/// Every kernel, and every hyperparameter that selects a different code path.
const OPTIMIZERS: [&str; 51] = [
    r#"{"name":"sgd"}"#,
    r#"{"name":"sgd","weight_decay":0.1,"maximize":true}"#,
    r#"{"name":"sgd","momentum":0.9,"dampening":0.5}"#,
    r#"{"name":"sgd","momentum":0.9,"nesterov":true,"weight_decay":0.1}"#,
    r#"{"name":"asgd"}"#,
    r#"{"name":"asgd","t0":1.0,"lambd":0.1,"weight_decay":0.1}"#,
    r#"{"name":"asgd","t0":-1.0,"alpha":0.5,"maximize":true}"#,
    r#"{"name":"adam"}"#,
    r#"{"name":"adam","weight_decay":0.1,"beta1":0.25}"#,
    r#"{"name":"adam","amsgrad":true,"maximize":true}"#,
    r#"{"name":"adam","beta1":0.0,"beta2":0.0}"#,
    r#"{"name":"adamw"}"#,
    r#"{"name":"adamw","weight_decay":0.5,"amsgrad":true}"#,
    r#"{"name":"adamw","maximize":true}"#,
    r#"{"name":"adamax"}"#,
    r#"{"name":"adamax","weight_decay":0.1,"beta2":0.5,"maximize":true}"#,
    r#"{"name":"adamax","paddle":true,"eps":0.1}"#,
    r#"{"name":"nadam"}"#,
    r#"{"name":"nadam","beta1":0.3,"momentum_decay":0.5,"weight_decay":0.1}"#,
    r#"{"name":"nadam","paddle":true,"momentum_decay":0.5}"#,
    r#"{"name":"nadam","weight_decay":0.1,"decoupled_weight_decay":true}"#,
    r#"{"name":"nadam","beta1":0.0,"beta2":0.0,"maximize":true}"#,
    r#"{"name":"radam"}"#,
    r#"{"name":"radam","beta2":0.6,"weight_decay":0.1}"#,
    r#"{"name":"radam","beta2":0.9,"weight_decay":0.1,"decoupled_weight_decay":true}"#,
    r#"{"name":"radam","beta2":0.0,"maximize":true}"#,
    r#"{"name":"adagrad"}"#,
    r#"{"name":"adagrad","lr_decay":0.5,"weight_decay":0.1,"maximize":true}"#,
    r#"{"name":"adadelta"}"#,
    r#"{"name":"adadelta","weight_decay":0.1,"maximize":true}"#,
    r#"{"name":"adadelta","rho":1.0}"#,
    r#"{"name":"adafactor"}"#,
    r#"{"name":"adafactor","weight_decay":0.1,"beta2_decay":-0.3,"maximize":true}"#,
    r#"{"name":"adafactor","eps1":0.1,"eps2":10.0,"lr":1.0}"#,
    r#"{"name":"adafactor","eps1":0.0,"d":1e9}"#,
    r#"{"name":"rmsprop"}"#,
    r#"{"name":"rmsprop","weight_decay":0.1,"maximize":true}"#,
    r#"{"name":"rmsprop","momentum":0.9}"#,
    r#"{"name":"rmsprop","centered":true}"#,
    r#"{"name":"rmsprop","centered":true,"alpha":0.3}"#,
    r#"{"name":"rmsprop","centered":true,"momentum":0.5}"#,
    r#"{"name":"rmsprop","paddle":true,"eps":0.1}"#,
    r#"{"name":"rmsprop","paddle":true,"momentum":0.9}"#,
    r#"{"name":"rmsprop","paddle":true,"centered":true,"momentum":0.5}"#,
    r#"{"name":"lion"}"#,
    r#"{"name":"lion","weight_decay":0.1,"maximize":true}"#,
    r#"{"name":"lamb"}"#,
    r#"{"name":"lamb","weight_decay":0.1}"#,
    r#"{"name":"lamb","maximize":true,"eps":0.1}"#,
    r#"{"name":"lamb","beta1":0.25}"#,
    r#"{"name":"average"}"#,
];

/// Rows that are shorter and longer than the lanes of a sum, and several matrices.
const MATRICES: [&[usize]; 9] = [
    &[1, 1],
    &[3, 0],
    &[1, 1_003],
    &[1_003, 1],
    &[37, 53],
    &[4, 16],
    &[3, 5, 33],
    &[8, 4, 3, 3],
    &[5, 7, 1, 1],
];

pub(super) fn run<B: Backend>(backend: &B) {
    for json in OPTIMIZERS {
        let optimizer: Optimizer = serde_json::from_str(json).unwrap();
        optimizer.validate().unwrap();
        for numel in [0, 1, 7, 1_003, 2_049] {
            steps_equal_the_reference(backend, &optimizer, &[numel], None);
        }
        for dtype in DType::ALL {
            steps_equal_the_reference(backend, &optimizer, &[4_099], Some(dtype));
        }
        if let Optimizer::Adafactor(_) = optimizer {
            for shape in MATRICES {
                steps_equal_the_reference(backend, &optimizer, shape, Some(DType::Bf16));
            }
        }
    }
    let lamb = "lamb".parse().unwrap();
    steps_equal_the_reference(backend, &lamb, &[BLOCK], None);
    steps_equal_the_reference(backend, &lamb, &[2 * BLOCK + 77], Some(DType::Bf16));
    a_zero_norm_is_trusted(backend);
}

/// A few steps with different learning rates and coefficients give the same parameters, state and
/// cast parameters.
fn steps_equal_the_reference<B: Backend>(
    backend: &B,
    optimizer: &Optimizer,
    shape: &[usize],
    published_as: Option<DType>,
) {
    let numel = shape.iter().product();
    let mut expected = numbers(10, numel);
    // Sums and averages of squares are positive. A first step must not depend on a momentum buffer.
    let initial: Vec<f32> = numbers(11, numel).iter().map(|value| value * value).collect();
    let dims: Vec<u64> = shape.iter().map(|&size| size as u64).collect();
    let shapes = optimizer.state_shapes(&dims);
    let of_shape = |of: &StateShape| initial[..of.numel(numel)].to_vec();
    let mut expected_state: Vec<_> = shapes.iter().map(of_shape).collect();
    let of = |values: &Vec<f32>| buffer_of(backend, values, DType::F32);
    let mut arrays: Vec<_> = [&expected].into_iter().chain(&expected_state).map(of).collect();
    let mut applied = AppliedSteps::default();
    for (step, coefficient) in [(1, 1.0), (2, 0.3), (3, -0.0), (4, 1e-3)] {
        let mut optimizer = *optimizer;
        optimizer.set_lr(optimizer.lr().unwrap_or_default() / step as f64);
        let update = Update::after(applied, &optimizer, coefficient);
        applied = update.applied();
        let values = numbers(20 + step as usize, numel);
        let gradient = buffer_of(backend, &values, DType::F32);
        let mut published = published_as.map(|dtype| backend.allocate(dtype, numel).unwrap());
        // A reader holds the earlier values of every other step.
        let held = step % 2 == 0;
        let mut outputs: Vec<_> = arrays.into_iter().map(|of| next(backend, of, held)).collect();
        let [master, state @ ..] = &mut outputs[..] else { unreachable!("there is a master") };
        let state = state.iter_mut().map(output).collect();
        backend.apply(&update, output(master), state, &gradient, published.as_mut()).unwrap();
        let mut before = vec![expected.clone()];
        before.extend(expected_state.iter().cloned());
        reference::apply(&update, &mut expected, &mut expected_state, &values);

        let what = format!("{optimizer:?}, shape {shape:?}, step {step}");
        let names = ["master"].into_iter().chain(optimizer.state().iter().copied());
        let after = [&expected].into_iter().chain(&expected_state);
        arrays = Vec::new();
        for (((name, expected), (buffer, held)), before) in
            names.zip(after).zip(outputs).zip(&before)
        {
            arrays.push(assert_contents(backend, buffer, expected, &format!("{name} of {what}")));
            if let Some(held) = held {
                let held = Arc::into_inner(held).expect("the step has ended");
                assert_contents(backend, held, before, &format!("held {name} of {what}"));
            }
        }
        if let Some(published) = published {
            let dtype = backend.dtype(&published);
            let expected = from_bytes(&to_bytes(&expected, dtype), dtype);
            assert_contents(backend, published, &expected, &format!("{dtype} of {what}"));
        }
    }
}

/// The buffer for the next values of `buffer` and, if a reader holds it, `buffer` itself. The
/// former has other values then.
fn next<B: Backend>(
    backend: &B,
    buffer: B::Buffer,
    is_held: bool,
) -> (B::Buffer, Option<Arc<B::Buffer>>) {
    match is_held {
        true => {
            let other = numbers(30, backend.numel(&buffer));
            (buffer_of(backend, &other, DType::F32), Some(Arc::new(buffer)))
        }
        false => (buffer, None),
    }
}

fn output<T>((buffer, earlier): &mut (T, Option<Arc<T>>)) -> Output<'_, T> {
    Output { buffer, earlier: earlier.clone() }
}

/// LAMB changes tensors that are zero, and leaves tensors without an update unchanged.
fn a_zero_norm_is_trusted<B: Backend>(backend: &B) {
    let optimizer: Optimizer = "lamb".parse().unwrap();
    let update = Update::after(AppliedSteps::default(), &optimizer, 1.0);
    for (parameter, gradient) in [(0.0, 1.0), (1.0, 0.0), (0.0, 0.0)] {
        let mut expected = vec![parameter; 5];
        let mut expected_state = vec![vec![0.0; 5]; 2];
        let mut master = buffer_of(backend, &expected, DType::F32);
        let mut moments = [(); 2].map(|()| backend.allocate(DType::F32, 5).unwrap());
        let gradient = vec![gradient; 5];
        let gradients = buffer_of(backend, &gradient, DType::F32);
        let moments = moments.iter_mut().map(Into::into).collect();
        backend.apply(&update, (&mut master).into(), moments, &gradients, None).unwrap();
        reference::apply(&update, &mut expected, &mut expected_state, &gradient);
        assert!(expected.iter().all(|value| value.is_finite()));
        assert_contents(backend, master, &expected, "LAMB with a zero norm");
    }
}

fn assert_contents<B: Backend>(
    backend: &B,
    buffer: B::Buffer,
    expected: &[f32],
    what: &str,
) -> B::Buffer {
    let dtype = backend.dtype(&buffer);
    let (bytes, buffer) = contents(backend, buffer);
    assert_same(&from_bytes(&bytes, dtype), expected, what);
    buffer
}
