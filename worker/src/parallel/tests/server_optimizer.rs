//! The upload and the lease of a rank.

use super::*;

/// A linear layer that is cut, and a large tensor that the first rank uploads alone.
#[derive(Module, Debug)]
struct Large<B: Backend> {
    cut: ParallelLinear<B>,
    whole: Param<Tensor<B, 1>>,
}

impl<B: ParallelBackend> Parallelize<B> for Large<B> {
    fn layers(&mut self) -> Vec<(String, Layer<'_, B>)> {
        vec![("cut".into(), (&mut self.cut).into())]
    }
}

#[test]
fn a_rank_that_leaves_at_once_does_not_take_its_upload_along() {
    with_cluster(1, |world, settings, runtime| {
        let mesh = line(&world, 2);
        let mut module = Large::<Graph> {
            cut: linear(1, 4, 4),
            whole: Param::from_tensor(Tensor::ones([1 << 22], &Default::default()).require_grad()),
        };
        let mut layer = Layer::from(&mut module.cut);
        layer.shard("weight", &mesh, &[Shard(1)]).unwrap();
        let optimizer = shard_optimizer(&mut module, &mesh, settings, runtime).unwrap();
        // The second rank has uploaded its columns long before the first one has uploaded the rest.
        if world.rank() == 1 {
            return optimizer.leave().unwrap();
        }
        let pulled = optimizer.pull(module).unwrap();
        assert_eq!(values(pulled.cut.weight.val()).len(), 8);
        optimizer.leave().unwrap();
    });
}
