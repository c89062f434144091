"""The mutants: a sign, a divisor, an order, a missing term. Each names the case of `tests.promises.cases` that must
notice it, and the options of the case where they are not "decay"."""

from tests.helpers.mutants.apply import mutants

MUTANTS = mutants(r"""
# FedAvg: the server's step and the weights of clients
algorithms.base Algorithm.step_server: {**server, 'w': apply_update(server['w'], round.server_lr *
    aggregate.mean('delta'))} => {**server, 'w': apply_update(server['w'], aggregate.mean('delta'))} @ fedavg
algorithms.base apply_update: w.double() + update => w.double() - update @ fedavg
loop.loop Loop.weight_of: self.settings.weighting == 'samples' => False @ fedavg momentum
loop.loop Loop.weight_of: self.settings.weighting == 'samples' => True @ fedavg
# FedAdam, FedAdagrad, FedYogi
algorithms.adaptive AdaptiveServer.step_server: (1 - self.beta1) * delta => delta @ fedadam
algorithms.adaptive AdaptiveServer.step_server: (1 - self.beta1) * delta => delta @ fedadagrad-momentum
algorithms.adaptive FedAdam.second_moment: (1 - self.beta2) * square => square @ fedadam
algorithms.adaptive AdaptiveServer.step_server: delta ** 2 => delta.abs() @ fedadam-start
algorithms.adaptive AdaptiveServer.step_server: self.beta1 * server['m'].double() => self.beta2 * server['m'].double() @
    fedadam
algorithms.adaptive FedAdam.second_moment: self.beta2 * V => V @ fedadam
algorithms.adaptive AdaptiveServer.step_server: size.sqrt() + self.tau => (size + self.tau).sqrt() @ fedadam
algorithms.adaptive AdaptiveServer.step_server: self.tau => 0.01 @ fedadam
algorithms.adaptive AdaptiveServer.step_server: round.server_lr * step => step @ fedadam
algorithms.adaptive AdaptiveServer.init_server: torch.full_like(w0, self.V0) => torch.zeros_like(w0) @ fedadam-start
algorithms.adaptive FedAdam.correct_bias: self.beta1 ** (round.index + 1) => self.beta1 ** (round.index + 2) @
    fedadam-corrected
algorithms.adaptive FedAdam.correct_bias: self.beta2 => self.beta1 @ fedadam-corrected
algorithms.adaptive FedAdam.correct_bias: self.bias_correction => True @ fedadam
algorithms.adaptive FedAdagrad.second_moment: V + square => square @ fedadagrad
algorithms.adaptive FedAdagrad.second_moment: V + square => 0.99 * V + square @ fedadagrad-momentum
# V never falls
algorithms.adaptive FedYogi.second_moment: (V - square).sign() => -1.0 @ fedyogi
# Adam
algorithms.adaptive FedYogi.second_moment: (1 - self.beta2) * square * (V - square).sign() => (1 - self.beta2) * (V -
    square) @ fedyogi
algorithms.adaptive FedYogi.second_moment: (1 - self.beta2) * square => square @ fedyogi
# FedAvgM, FedNova, FedExP
algorithms.fedavgm FedAvgM.step_server: self.beta * server['m'].double() => server['m'].double() @ fedavgm
algorithms.fedavgm FedAvgM.step_server: aggregate.mean('delta') => (1 - self.beta) * aggregate.mean('delta') @ fedavgm
algorithms.fedavgm FedAvgM.step_server: round.server_lr * m => m @ fedavgm
algorithms.fednova FedNova.step_server: round.server_lr * aggregate.mean('a') => round.server_lr @ fednova
algorithms.fednova FedNova.finish: results.delta / a => results.delta @ fednova
algorithms.fednova FedNova.step_server: round.server_lr * aggregate.mean('a') => aggregate.mean('a') @ fednova
algorithms.fednova weight_of_gradients: momentum * step + 1 => 1.0 @ fednova momentum
algorithms.fednova weight_of_gradients: 1 + momentum * step if nesterov else step => step - total @ fednova momentum
loop.options Settings.round: facts.momentum => 0.0 @ fednova momentum
algorithms.fedexp FedExP.step_server: (aggregate.mean('square') / (2 * (delta.square().sum() + self.eps))).clamp(min=1)
    => (aggregate.mean('square') / (2 * (delta.square().sum() + self.eps))).clamp(min=0) @ fedexp-last
algorithms.fedexp FedExP.step_server: (aggregate.mean('square') / (2 * (delta.square().sum() + self.eps))).clamp(min=1)
    => (aggregate.mean('square') / (2 * (delta.square().sum() + self.eps))).clamp(max=1) @ fedexp
algorithms.fedexp FedExP.step_server: 2 * (delta.square().sum() + self.eps) => 1 * (delta.square().sum() + self.eps) @
    fedexp
algorithms.fedexp FedExP.step_server: delta.square().sum() + self.eps => delta.square().sum() @ fedexp
algorithms.fedexp FedExP.finish: norm ** 2 => norm @ fedexp
algorithms.fedexp FedExP.step_server: 0.5 * eta => eta @ fedexp
algorithms.fedexp FedExP.local_step: server['x'] => None @ fedexp
# SCAFFOLD, FedGAMMA, FedLESAM_S
algorithms.scaffold SCAFFOLD.correction: server['c'] - client['c_i'] => client['c_i'] - server['c'] @ scaffold
algorithms.scaffold SCAFFOLD.correction: server['c'] - client['c_i'] => server['c'] @ scaffold
algorithms.scaffold SCAFFOLD.correction: server['c'] - client['c_i'] => -client['c_i'] @ fedgamma
algorithms.scaffold SCAFFOLD.finish: -round.lr => round.lr @ scaffold
algorithms.scaffold SCAFFOLD.finish: round.lr => round.first_lr @ scaffold
algorithms.scaffold SCAFFOLD.finish: -round.lr * K => -round.lr * round.local_epochs @ fedgamma
algorithms.scaffold SCAFFOLD.finish: results.delta / results.column((-round.lr * K for K in
    results.num_steps)) - server['c'] => results.delta / results.column((-round.lr * K for K in results.num_steps)) @
    scaffold
algorithms.scaffold SCAFFOLD.finish: {**state, 'c_i': client['c_i'] + change} => {**state, 'c_i': change} @
    scaffold
algorithms.scaffold SCAFFOLD.step_server: {**new_state, 'c': apply_update(server['c'], aggregate.sum('dc') /
    round.num_clients)} => {**new_state, 'c': apply_update(server['c'], aggregate.sum('dc') / round.cohort_size)} @
    scaffold
algorithms.scaffold SCAFFOLD.step_server: {**new_state, 'c': apply_update(server['c'], aggregate.sum('dc') /
    round.num_clients)} => {**new_state, 'c': apply_update(server['c'], 0 * aggregate.sum('dc'))} @ fedlesam-s
algorithms.fedgamma FedGAMMA.local_step: self.correction(server, client) => None @ fedgamma
algorithms.fedgamma FedGAMMA.local_step: rho=rho => rho=0.0 @ fedgamma
algorithms.fedlesam FedLESAM_S.local_step: self.control_scale * self.correction(server, client) =>
    self.correction(server, client) @ fedlesam-s
# FedCM, MoFedSAM
algorithms.fedcm FedCM.local_step: a=self.alpha => a=1 - self.alpha @ fedcm
algorithms.fedcm FedCM.local_step: a=self.alpha => a=1.0 @ fedcm
algorithms.fedcm FedCM.local_step: (1 - self.alpha) * server['D'] => server['D'] @ fedcm
algorithms.fedsam MoFedSAM.local_step: a=self.beta => a=1.0 @ mofedsam
algorithms.fedsam MoFedSAM.local_step: (1 - self.beta) * server['D'] => server['D'] @ mofedsam
algorithms.fedsam MoFedSAM.local_step: rho=rho => rho=0.0 @ mofedsam
algorithms.fedcm ServerDirection.finish: -round.lr => round.lr @ fedcm
algorithms.fedcm ServerDirection.finish: round.lr => round.first_lr @ mofedsam
algorithms.fedcm ServerDirection.finish: -round.lr * K => -round.lr @ fedcm
algorithms.fedcm ServerDirection.finish: self.momentum_K == 'steps' => self.momentum_K != 'steps' @
    fedcm-epochs
algorithms.fedcm ServerDirection.step_server: {**super().step_server(server, aggregate, round), 'D':
    aggregate.mean('D').to(server['D'].dtype)} => {**super().step_server(server, aggregate, round), 'D':
    (aggregate.mean('D') + server['D']).to(server['D'].dtype)} @ mofedsam
# MimeLite
algorithms.mimelite MimeLite.local_step: self._fresh => 1.0 @ mimelite
algorithms.mimelite MimeLite.local_step: (1 - self.beta) * server['m'] => server['m'] @ mimelite
algorithms.mimelite MimeLite.step_server: self._fresh * aggregate.mean('G') => aggregate.mean('G') @ mimelite
algorithms.mimelite MimeLite.step_server: self._fresh => -self._fresh @ mimelite-heavy
algorithms.mimelite MimeLite.step_server: 1 - self.beta => 0 @ mimelite
algorithms.mimelite MimeLite._fresh: self.beta if self.momentum_form == 'convex' else 1.0 => self.beta @ mimelite-heavy
executors.task Task._full_batches: num_labels(split_pair(x)[1] if has_pairs else y, n, ignored) => 1 @ mimelite
# FedDyn, FedLESAM_D, FedSMOO, FedSpeed, FedProx: the proximal half
algorithms.feddyn attraction: client['h_i'] => -client['h_i'] @ feddyn
algorithms.feddyn attraction: client['h_i'] - server['w'] => client['h_i'] + server['w'] @ feddyn
algorithms.feddyn attraction: client['h_i'] - server['w'] => -server['w'] @ fedspeed
algorithms.feddyn DynamicRegularizer.finish: {**state, 'h_i': client['h_i'] + results.delta} => {**state,
    'h_i': client['h_i'] - results.delta} @ feddyn
algorithms.feddyn DynamicRegularizer.finish: {**state, 'h_i': client['h_i'] + results.delta} => {**state,
    'h_i': results.delta} @ fedlesam-d
algorithms.feddyn DynamicRegularizer.step_server: round.num_clients => round.cohort_size @ feddyn
algorithms.feddyn DynamicRegularizer.step_server: server['H'] => 0 * server['H'] @ feddyn
algorithms.feddyn DynamicRegularizer.step_server: {**new_state, 'H': H, 'w': apply_update(server['w'],
    aggregate.mean('delta') + H.double())} => {**new_state, 'H': H, 'w': apply_update(server['w'],
    aggregate.mean('delta'))}
    @ feddyn
# the old H
algorithms.feddyn DynamicRegularizer.step_server: {**new_state, 'H': H, 'w': apply_update(server['w'],
    aggregate.mean('delta') + H.double())} => {**new_state, 'H': H, 'w': apply_update(server['w'],
    aggregate.mean('delta') +
    server['H'].double())} @ feddyn
algorithms.feddyn DynamicRegularizer.step_server: {**new_state, 'H': H, 'w': apply_update(server['w'],
    aggregate.mean('delta') + H.double())} => {**new_state, 'H': H, 'w': apply_update(server['w'],
    aggregate.mean('delta') -
    H.double())} @ fedsmoo
algorithms.feddyn DynamicRegularizer.phi_of: decay_rate('phi', self.phi, 'phi_decay', self.phi_decay, round.index) =>
    self.phi @ feddyn-decay
algorithms.feddyn DynamicRegularizer.phi_of: round.index => round.index + 1 @ feddyn-decay
algorithms.feddyn FedDyn.local_step: prox=phi => prox=0.0 @ feddyn
algorithms.fedlesam FedLESAM_D.local_step: prox=phi => prox=0.0 @ fedlesam-d
algorithms.fedprox FedProx.local_step: -self.phi => self.phi @ fedprox
algorithms.fedprox FedProx.local_step: prox=self.phi => prox=0.0 @ fedprox
algorithms.fedspeed FedSpeed.local_step: SAM(rho=rho, a=self.alpha, b=1 - self.alpha, q=q, prox=self.phi) =>
    SAM(rho=rho, a=1 - self.alpha, b=self.alpha, q=q, prox=self.phi) @ fedspeed
algorithms.fedspeed FedSpeed.local_step: 1 - self.alpha => 0.0 @ fedspeed
algorithms.fedspeed FedSpeed.finish: client['h_i'] + results.delta => results.delta @ fedspeed
algorithms.fedspeed FedSpeed.finish: results.delta + h_i => results.delta + client['h_i'] @ fedspeed
algorithms.fedspeed FedSpeed.finish: results.delta + h_i => results.delta @ fedspeed
# FedSWA, FedMoSWA, FedNSAM
algorithms.fedswa FedSWA.local_step: self.rho => 1.0 @ fedswa
algorithms.fedswa FedSWA.step_server: {**server, 'w': apply_update(server['w'], self.alpha * round.server_lr *
    aggregate.mean('delta'))} => {**server, 'w': apply_update(server['w'], round.server_lr * aggregate.mean('delta'))} @
    fedswa
algorithms.fedswa Falling.rate: (1 - self.end) * k => (1 - self.end) * (k + 1) @ fedswa
algorithms.fedswa lr_sum: steps - 1 => steps @ fedmoswa
algorithms.fedswa FedMoSWA.local_step: end=self.rho =>  @ fedmoswa
algorithms.fedswa FedMoSWA.finish: client['c_i'] - server['c'] => client['c_i'] @ fedmoswa
algorithms.fedswa FedMoSWA.finish: c_i - server['c'] => c_i @ fedmoswa
algorithms.fedswa FedMoSWA.step_server: aggregate.num_clients => round.num_clients @ fedmoswa
algorithms.fedswa FedMoSWA.step_server: self.gamma * aggregate.sum('dc') => aggregate.sum('dc') @ fedmoswa
algorithms.fedswa FedMoSWA.step_server: self.alpha * round.server_lr => round.server_lr @ fedmoswa
algorithms.fednsam FedNSAM.local_step: self.gamma * server['m'] => server['m'] @ fednsam
algorithms.fednsam FedNSAM.step_server: self.gamma * server['m'].double() => server['m'].double() @ fednsam
algorithms.fednsam FedNSAM.local_step: -server['m'] => server['m'] @ fednsam-momentum
algorithms.fednsam FedNSAM.local_step: Shifted(rho=rho, e=-server['m'], start=start) => Shifted(rho=rho, e=-server['m'])
    @ fednsam-momentum
algorithms.fednsam FedNSAM.local_step: SAM(rho=rho, start=start) => SAM(rho=rho) @ fednsam
algorithms.fednsam FedNSAM.local_step: value_at('rho', self.rho, round) => 0.0 @ fednsam
# FedGloSS
algorithms.fedgloss FedGloSS.step_server: -delta => delta @ fedgloss
algorithms.fedgloss FedGloSS.local_step: server['w'] + value_at('rho', self.rho, round) * server['d'] => server['w'] @
    fedgloss
algorithms.fedgloss FedGloSS.local_step: SAM(rho=rho_local, q=q, prox=phi, start=start) => SAM(rho=rho_local, q=q,
    prox=phi) @ fedgloss
algorithms.fedgloss FedGloSS.local_step: client['h_i'] - start => client['h_i'] - server['w'] @ fedgloss
algorithms.fedgloss FedGloSS.local_step: client['h_i'] - start => -start @ fedgloss-sgd
algorithms.fedgloss FedGloSS.local_step: rho=rho_local => rho=0.0 @ fedgloss
algorithms.fedgloss FedGloSS.step_server: -delta / (torch.linalg.vector_norm(delta) + NU) => -delta @ fedgloss-sgd
# FedGMT, FedNTD
algorithms.fedgmt FedGMT.local_step: client['h_i'] => -client['h_i'] @ fedgmt
algorithms.fedgmt FedGMT.distillation: self.gamma => 1.0 @ fedgmt
algorithms.fedgmt FedGMT.local_step: server['e'] => server['w'] @ fedgmt
algorithms.fedgmt FedGMT.step_server: new_state['w'] => server['w'] @ fedgmt
algorithms.fedgmt FedGMT.distillation: divergence(outputs, teacher_outputs, self.tau) =>
    divergence(teacher_outputs, outputs, self.tau) @ fedgmt
algorithms.fedntd FedNTD.not_true_distillation: classes == y.unsqueeze(1) => None @ fedntd
algorithms.fedntd FedNTD.not_true_distillation: self.beta => 1.0 @ fedntd
# FedSOL
algorithms.fedsol FedSOL.local_step: value_at('rho', self.rho, round) => 1.0 @ fedsol
algorithms.fedsol Orthogonal.objective: divergence(outputs, teacher, self.tau) => divergence(teacher, outputs, self.tau)
    @ fedsol
algorithms.fedsol Orthogonal.__call__: passes(self.objective, passes.outputs_of(rows['start'])) => passes() @ fedsol
algorithms.fedsol Orthogonal.__call__: torch._foreach_mul_(parts, g_p.tensors) => torch._foreach_copy_(parts,
    g_p.tensors) @ fedsol
executors.gradient_passes ModelPasses.run: check_scalar(objective(loss, outputs, y, *operands)) => loss +
    objective(loss, outputs, y, *operands) @ fedsol
executors.gradient_passes ModelPasses.run: value if penalty is None else value + check_scalar(penalty(outputs)) =>
    value @ moon
algorithms.fedsol Orthogonal.__call__: torch.sub(rows.w, rows['start'], out=rows['direction']).abs_() =>
    torch.sub(rows.w, rows['start'], out=rows['direction']) @ fedsol
algorithms.fedsol Orthogonal.__call__: torch.linalg.vector_norm(far, dim=1, keepdim=True) =>
    torch.linalg.vector_norm(far, dim=-1, keepdim=True) @ fedsol
# MOON
algorithms.moon MOON.contrast: s_old - s => s - s_old @ moon
algorithms.moon MOON.contrast: (s_old - s) / self.tau => s_old - s @ moon
algorithms.moon MOON.contrast: self.mu => 1.0 @ moon
algorithms.moon MOON.contrast: (z_t, z_i) => (z_i, z_t) @ moon
algorithms.moon MOON.finish: server['w'] => client['w_i'] @ moon
algorithms.moon MOON.record_features: module.register_forward_hook if self.features else
    module.register_forward_pre_hook => module.register_forward_hook @ moon
executors.extra_models Teachers.get: known != key => False @ moon
algorithms.distillation divergence: temperature ** 2 * (share * (q - p)).sum(1).mean() => (share * (q -
    p)).sum(1).mean() @ fedgmt
algorithms.distillation divergence: (outputs / temperature, teacher_outputs / temperature) => (outputs,
    teacher_outputs) @ fedntd
algorithms.distillation divergence: (share * (q - p)).sum(1) => share * (q - p) @ fedntd
# FedWMSAM
algorithms.fedwmsam AlongPath.__call__: -1.0 => 1.0 @ fedwmsam
algorithms.fedwmsam FedWMSAM.local_step: D=D_i => D=server['D'] @ fedwmsam
algorithms.fedwmsam FedWMSAM.local_step: (1 - alpha) * D_i => D_i @ fedwmsam
algorithms.fedwmsam FedWMSAM.local_step: a=alpha => a=1.0 @ fedwmsam
algorithms.fedwmsam FedWMSAM.local_step: alpha / (1 - alpha) => alpha @ fedwmsam
algorithms.fedwmsam FedWMSAM.finish: -round.lr => round.lr @ fedwmsam
algorithms.fedwmsam FedWMSAM.step_server: 1 + aggregate.mean('cos') => 1 - aggregate.mean('cos') @ fedwmsam
algorithms.fedwmsam FedWMSAM.step_server: (1 + aggregate.mean('cos')).clamp(MIN_TARGET, MAX_TARGET) =>
    1 + aggregate.mean('cos') @ fedwmsam
algorithms.fedwmsam FedWMSAM.step_server: (1 - self.alpha_rate) * server['alpha'] => server['alpha'] @ fedwmsam
algorithms.fedwmsam AlongPath.__call__: rows['path'].add_(rows['D']) => pass @ fedwmsam
algorithms.fedwmsam AlongPath.begin: rows['path'].zero_() => pass @ fedwmsam
# FedTOGA
algorithms.fedtoga FedTOGA.local_step: self.kappa * D => D @ fedtoga
algorithms.fedtoga FedTOGA.local_step: self.beta * D => D @ fedtoga
algorithms.fedtoga Remembering.__call__: torch._foreach_copy_(rows.views_like(g2, rows['last']), g2.tensors) => pass @
    fedtoga
algorithms.fedtoga FedTOGA.step_server: {**super().step_server(server, aggregate, round), 'D':
    (-aggregate.mean('delta')).to(server['D'].dtype)} => {**super().step_server(server, aggregate, round), 'D':
    aggregate.mean('delta').to(server['D'].dtype)} @ fedtoga
algorithms.fedtoga FedTOGA.local_step: rho=rho => rho=0.0 @ fedtoga
algorithms.fedtoga Remembering.begin: rows['last'].zero_() => pass @ fedtoga
# FedGF
algorithms.fedgf FedGF.local_step: max(1, min(round.index, self.window)) => self.window @ fedgf
algorithms.fedgf FedGF.local_step: min(round.index, self.window) => round.index @ fedgf-window
algorithms.fedgf FedGF.step_server: round.index % self.window => 0 @ fedgf
algorithms.fedgf FedGF.step_server: aggregate.mean('length') > self.threshold => aggregate.mean('length') <
    self.threshold @ fedgf
algorithms.fedgf FedGF.local_step: server['d'] => -server['d'] @ fedgf
algorithms.fedgf FedGF.local_step: server['apart'].new_full((1, 1), c) => server['apart'].new_full((1, 1), c / 2) @
    fedgf
algorithms.fedgf FedGF.step_server: server['w'].double() => 2 * server['w'].double() @ fedgf
# FedSCAM
algorithms.fedscam FedSCAM.radius: 1 + self.alpha * self._orthogonal(norms, cosines(-gradients, u)) => 2 + self.alpha *
    self._orthogonal(norms, cosines(-gradients, u)) @ fedscam
algorithms.fedscam FedSCAM.radius: rho / (1 + self.alpha * self._orthogonal(norms, cosines(-gradients, u))) => rho *
    (1 + self.alpha * self._orthogonal(norms, cosines(-gradients, u))) @ fedscam
algorithms.fedscam FedSCAM.radius: self.alpha => self.gamma @ fedscam
algorithms.fedscam FedSCAM.radius: -gradients => gradients @ fedscam
algorithms.fedscam FedSCAM.finish: -results.outputs['gradient'] => results.outputs['gradient'] @ fedscam
algorithms.fedscam FedSCAM.finish: -results.outputs['gradient'] => results.delta @ fedscam
algorithms.fedscam FedSCAM._orthogonal: 1 - self.kappa * c => 1 + self.kappa * c @ fedscam
algorithms.fedscam FedSCAM._orthogonal: (1 - self.kappa * c).clamp(min=0) => 1 - self.kappa * c @ fedscam-turned
algorithms.fedscam FedSCAM.finish: (1 + self.beta * c).clamp(min=0) => (1 + self.beta * c).abs() @ fedscam-turned
algorithms.fedscam FedSCAM.finish: 1 + self.beta * c => 1 - self.beta * c @ fedscam
algorithms.fedscam FedSCAM.finish: self.gamma => 0 @ fedscam
algorithms.fedscam FedSCAM.step_server: new_state['w'].double() => 2 * new_state['w'].double() @ fedscam
executors.task Task.first_batches: min(batches, len(self.work.batch_sizes())) => batches @ fedscam
executors.task Task.first_batches: islice(self.work.batches(), batches) => self.work.batches() @ fedscam
executors.client_trainer ClientTrainer._mean: norms.add_(gradients.norms(1)[:, None], alpha=share) =>
    norms.copy_(gradients.norms(1)[:, None]) @ fedscam
update.gradients Gradients.norms: torch.stack(squares).sum(0).sqrt() => torch.stack(squares).sum(0) @ fedscam
algorithms.fedscam Piloted.begin: self.algorithm.pilots => 1 @ fedscam
# FedSMOO
algorithms.fedsmoo FedSMOO.local_step: self.alpha => 1.0 @ fedsmoo-alpha
algorithms.fedsmoo FedSMOO.finish: self.alpha * dual => dual @ fedsmoo-alpha
algorithms.fedsmoo FedSMOO.finish: self.alpha * dual - eps => self.alpha * dual @ fedsmoo
algorithms.fedsmoo FedSMOO.finish: self.alpha * dual - eps => self.alpha * dual + eps @ fedsmoo-alone
algorithms.fedsmoo FedSMOO.finish: self.s_rule == 'mu_active' => False @ fedsmoo-mu-active
algorithms.fedsmoo FedSMOO.step_server: ({**new_state, 'mu': mu.to(server['mu'].dtype)}, -mu) => ({**new_state, 'mu':
    mu.to(server['mu'].dtype)}, mu) @ fedsmoo-mu-all
algorithms.fedsmoo FedSMOO.finish: dual - client['mu_i'] => dual @ fedsmoo-mu-all
algorithms.fedsmoo FedSMOO.local_step: server['s'] => 0 * server['s'] @ fedsmoo
algorithms.fedsmoo FedSMOO.local_step: client['mu_i'] => 0 * client['mu_i'] @ fedsmoo-alone
algorithms.fedsmoo FedSMOO.finish: {**state, 'mu_i': dual} => {**state, 'mu_i': client['mu_i']} @ fedsmoo
algorithms.fedsmoo FedSMOO.step_server: torch.linalg.vector_norm(r) + NU => 1.0 @ fedsmoo
algorithms.fedsmoo FedSMOO.step_server: value_at('rho', self.rho, round) * r => r @ fedsmoo
fastsam_kernels.reference dual_perturb_: mu_ + (e - s_) / h[HParam.PENALTY] => mu_ - (e - s_) / h[HParam.PENALTY] @
    fedsmoo clip-linear
fastsam_kernels.reference dual_perturb_: e - s_ => e + s_ @ fedsmoo clip-linear
fastsam_kernels.reference dual_perturb_: (e - s_) / h[HParam.PENALTY] => e - s_ @ fedsmoo-alpha clip-linear
fastsam_kernels.reference _dual_direction: h[HParam.PENALTY] * (g.to(dtype) - mu.to(dtype)) - s.to(dtype) =>
    h[HParam.PENALTY] * (g.to(dtype) - mu.to(dtype)) + s.to(dtype) @ fedsmoo
fastsam_kernels.reference _dual_direction: g.to(dtype) - mu.to(dtype) => g.to(dtype) + mu.to(dtype) @ fedsmoo
fastsam_kernels.reference dual_perturb_: e_.copy_(e) => e_.copy_(-e) @ fedsmoo-alone
# FedSAM, ASAM, schedules
algorithms.fedsam FedSAM.local_step: adaptive=self.adaptive =>  @ fedsam-asam
algorithms.fedsam FedSAM.local_step: self.eta => 0.0 @ fedsam-asam
fastsam_kernels.reference perturb_: t * t * direction => t * direction @ fedsam-asam
fastsam_kernels.reference norm_: (w.to(dtype).abs() + h[HParam.ETA]) * direction => direction @ fedsam-asam
fastsam_kernels.reference perturb_: w + scale * direction => w - scale * direction @ fedsam
update.steps SAM.__call__: rows.update(g2, None if self.b is None else g1) => rows.update(g1) @ fedsam
algorithms.schedule formula: {'round': float(index + 1), **variables} =>
    {'round': float(index), **variables} @ fedsam-schedule
# FedGSAM
algorithms.fedgsam FedGSAM.local_step: b=-self.alpha => b=self.alpha @ fedgsam
algorithms.fedgsam FedGSAM.radius: rho - self.rho_min => rho @ fedgsam-schedule
algorithms.fedgsam FedGSAM.radius: round.lr - self.lr_min => round.lr @ fedgsam-lr-min
algorithms.fedgsam FedGSAM.radius: round.first_lr - self.lr_min => round.first_lr @ fedgsam-lr-min
fastsam.step set_gsam_coefficients_: sign - hparams[:, :, HParam.G1_COEF] * overlap => sign + hparams[:, :,
    HParam.G1_COEF] * overlap @ fedgsam
fastsam.step set_gsam_coefficients_: sign - hparams[:, :, HParam.G1_COEF] * overlap => sign + 0 * overlap @ fedgsam
fastsam_kernels.reference inner_: (b * b).sum => (a * a).sum @ fedgsam
# FedLESAM
algorithms.fedlesam LocalEstimate.estimate_step: old - server['w'] => server['w'] - old @ fedlesam
algorithms.fedlesam LocalEstimate.estimate_step: -server['w'] => server['w'] @ fedlesam
algorithms.fedlesam LocalEstimate.estimate_step: self.initial_perturbation == 'none' => True @ fedlesam
algorithms.fedlesam LocalEstimate.estimate_step: self.initial_perturbation == 'none' => False @ fedlesam-none
algorithms.fedlesam LocalEstimate.finish: {**state, 'w_old_i': server['w']} => {**state, 'w_old_i': server['w'] +
    results.delta} @ fedlesam
algorithms.fedlesam LocalEstimate.step_server: {**new_state, 'w_old': server['w']} => {**new_state, 'w_old':
    new_state['w']} @
    fedlesam-last-round
algorithms.fedlesam LocalEstimate.estimate_step: client.get('w_old_i') if self.reference == 'client' else
    server.get('w_old') => False or server.get('w_old') @ fedlesam
update.steps Shifted.begin: rows.z.copy_(start) => rows.z.sub_(p) @ fedlesam
update.steps shift_coefficient: phi + rows.column(HParam.DECAY) => phi @ fedlesam
update.steps Shifted.begin: -coefficient.to(p.dtype) => coefficient.to(p.dtype) @ fedlesam-d
update.steps Shifted.begin: torch.sub(start, rows.z, out=p) => torch.sub(rows.z, start, out=p) @ fedlesam-d
# FedRobust
algorithms.fedrobust InputMap.ascend: 2 * self.lam * (Lam - identity) => self.lam * (Lam - identity) @ fedrobust
algorithms.fedrobust InputMap.ascend: 2 * self.lam * (Lam - identity) => 2 * self.lam * Lam @ fedrobust
algorithms.fedrobust InputMap.ascend: grad_delta - 2 * self.lam * delta => grad_delta @ fedrobust
algorithms.fedrobust InputMap.ascend: Lam + lr * grad_Lam => Lam - lr * grad_Lam @ fedrobust
algorithms.fedrobust InputMap.ascend: delta + lr * grad_delta => delta - lr * grad_delta @ fedrobust-diag
algorithms.fedrobust InputMap.ascend: identity + _project(Lam - identity, self.radius[0]) => _project(Lam,
    self.radius[0]) @
    fedrobust-radius
algorithms.fedrobust InputMap.ascend: _project(delta, self.radius[1]) => delta @ fedrobust-radius
algorithms.fedrobust FedRobust.train_client: round.lr => round.first_lr @ fedrobust-default
algorithms.fedrobust FedRobust.train_client: self.ascent_steps - 1 => 0 @ fedrobust-diag
algorithms.fedrobust FedRobust.input_map: state.get('Lam', Lam) => Lam @ fedrobust
algorithms.fedrobust FedRobust.train_client: {'Lam': input_map.Lam, 'delta': input_map.delta} =>
    {'Lam': input_map.Lam, 'delta': 0 * input_map.delta} @ fedrobust
# The run's own options, in the step
fastsam_kernels.reference _clip_factor: max=1.0 => max=2.0 @ fedavg clip-idle
fastsam_kernels.reference update_norm_: v = torch.where(h[HParam.CLIP_INCLUDES_PROX] != 0, v + h[HParam.PROX_MU] * w, v)
    => pass @ feddyn clip-active
fastsam_kernels.reference update_: torch.where(full, v + h[HParam.PROX_MU] * w, v) => v @ feddyn clip-active
fastsam_kernels.reference update_: torch.where(full, 0.0, h[HParam.PROX_MU]) => 0.0 @ feddyn clip-linear
fastsam_kernels.reference update_: w if shift_ is None else w - shift_ => w @ fedlesam clip-linear
fastsam_kernels.reference update_: torch.where(is_decoupled, 0.0, decay) => 0.0 * decay @ fedavg
fastsam_kernels.rules.sgd reference_update: h[DAMPENING] => mu @ fedavg momentum
update.rows Rows._take: zip(self.state, self.rule.initial_values, strict=True) => () @ fedavg momentum
update.row_memory _common_numbers: NU => 0.0 @ fedsam
""")

# Algorithms whose clients have local models, with the cases of tests/fed/algorithms/test_personal.py.
PERSONAL = mutants(r"""
loop.personal PersonalizedAlgorithm.row: row[self.places] = state[STATE_KEY].to(w.device) => row[self.places] += 0 *
    state[STATE_KEY].to(w.device) @ fedbn
loop.personal PersonalizedAlgorithm.local_step: buffers or None => None @ fedbn
loop.personal PersonalizedAlgorithm.finish: client[STATE_KEY] + results.delta[:, self.places] =>
    client[STATE_KEY] - results.delta[:, self.places] @ fedbn
loop.personal PersonalizedAlgorithm.local_step: start[:, self.places] = own => pass @ fedbn
loop.personal PersonalizedAlgorithm.finish: move_buffers(start, shift) => move_buffers(start, 0 * shift) @ fedbn
loop.personal PersonalizedAlgorithm._zero_own: x.masked_fill(self.mask, 0) if x.shape[-1:] == self.mask.shape else x =>
    x @ fedbn
algorithms.fedrep FedRep.train_client: i not in head => True @ fedrep
algorithms.fedrep FedRep.train_client: client.trainable(head) => client.trainable(range(len(layout.names))) @ fedrep
algorithms.fedrep FedRep.train_client: client.batches(self.head_epochs) => client.batches() @ fedrep
executors.client Client.batches: self._task.work.more(self._epochs, epochs) => self._task.work.more(0, epochs) @ fedrep
algorithms.ditto Ditto.train_client: -self.lam => self.lam @ ditto
algorithms.ditto Ditto.train_client: prox=self.lam =>  @ ditto
algorithms.ditto Ditto.finish: client['v_i'] => server['w'] @ ditto
algorithms.ditto Ditto.train_client: state['v_i'] => server['w'] @ ditto
algorithms.ditto Ditto.finish: results.delta => results.extra['delta_v'] @ ditto
algorithms.pfedme pFedMe.train_client: self.eta * self.lam => self.eta @ pfedme
algorithms.pfedme pFedMe.local_step: -self.lam => 0 @ pfedme
algorithms.pfedme pFedMe.finish: server['w'] + results.extra['delta_theta'] => server['w'] + results.delta @
    pfedme
algorithms.pfedme pFedMe.train_client: self.K => 1 @ pfedme
algorithms.pfedme pFedMe.train_client: torch.mul(w_i, -self.lam, out=offset) => pass @ pfedme
algorithms.pfedme pFedMe.train_client: w_i.lerp_(client.w, self.eta * self.lam) => w_i.copy_(client.w) @ pfedme
algorithms.pfedme pFedMe.train_client: client.start.clone() => client.start.clone().zero_() @ pfedme
algorithms.apfl APFL.finish: client['v_i'] => server['w'] @ apfl
algorithms.apfl APFL.train_client: client.second_model(state['v_i']) => client.second_model(server['w']) @ apfl
algorithms.apfl APFL.finish: results.extra['alpha'] => client['alpha'] @ apfl
algorithms.apfl APFL.train_client: v.update(gradients, alpha_before) => v.update(gradients) @ apfl
algorithms.apfl APFL.train_client: step == 0 and eta_alpha => eta_alpha @ apfl
algorithms.apfl APFL.train_client: v.w - w => w - v.w @ apfl
algorithms.apfl APFL.train_client: w.lerp(v.w, alpha.to(w.dtype)) => v.w @ apfl
algorithms.apfl APFL.train_client: (alpha - eta_alpha * client.dot(gradients, v.w - w)).clamp(0, 1) =>
    alpha - eta_alpha * client.dot(gradients, v.w - w) @ apfl-extreme
executors.client Client.begin: row.begin(step, start) => row.begin(step, row._global_weights) @ ditto
""")
