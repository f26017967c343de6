"""Losses of every recipe as float64 loops: response by response, token by token.

Log-probs and values are given; credit, weights, masks and averages are written from the papers'
formulas, and nothing of the package is called.
"""

import dataclasses
import math

LIMIT, GROUP = 12, 4
LENGTHS = (9, 1, 12, 4, 10, 2, 11, 5)
SUCCESS = (True, False, True, False, False, False, True, False)
BASELINE = (0.9, 0.2, 0.55, 0.4, 0.7, 0.05, 0.35, 0.5)


@dataclasses.dataclass(frozen=True)
class Case:
    """What is known of each response: log-probs of three policies, values of two critics."""

    now: list
    old: list
    mu: list
    values: list
    values_old: list
    reward: list

    def tokens(self, i):
        return range(len(self.now[i]))


# ----------------------------------------------------------------------------- credit


def over_tokens(case, per_response):
    return [[a] * len(case.now[i]) for i, a in enumerate(per_response)]


def gae(case, lam_of):
    found = []
    for i, values in enumerate(case.values_old):
        number, a = len(values), 0.0
        out = [0.0] * number
        for t in reversed(range(number)):
            last = t == number - 1
            delta = (case.reward[i] if last else values[t + 1]) - values[t]
            a = delta + lam_of(number) * a
            out[t] = a
        found.append(out)
    return found


def adaptive(alpha):
    return lambda number: max(0.0, 1.0 - 1.0 / (alpha * number))


def relative(case, *, divide):
    found = []
    for i, reward in enumerate(case.reward):
        others = case.reward[i // GROUP * GROUP : i // GROUP * GROUP + GROUP]
        mean = sum(others) / GROUP
        std = math.sqrt(sum((r - mean) ** 2 for r in others) / (GROUP - 1)) if divide else 1.0
        found.append((reward - mean) / std)
    return over_tokens(case, found)


def whitened(advantages):
    """Over all trainable tokens of the rollout batch, population std."""
    every = [a for one in advantages for a in one]
    mean = sum(every) / len(every)
    std = math.sqrt(sum((a - mean) ** 2 for a in every) / len(every))
    return [[(a - mean) / std for a in one] for one in advantages]


def gepo(case, advantages):
    """First batch: the thresholds are its own mu - 0.2 sigma and mu + 0.3 sigma."""
    entropy = []
    for g in range(2):
        every = [-x for i in range(g * GROUP, (g + 1) * GROUP) for x in case.old[i]]
        entropy.append(sum(every) / len(every))
    mu = sum(entropy) / 2
    sigma = math.sqrt(sum((h - mu) ** 2 for h in entropy) / 2)
    low, high, found = mu - 0.2 * sigma, mu + 0.3 * sigma, []
    for i, one in enumerate(advantages):
        h, out = entropy[i // GROUP], []
        for a in one:
            out.append(0.5 * a if a > 0 and h < low else 0.2 * a if a < 0 and h > high else a)
        found.append(out)
    assert found != advantages
    return found


# ------------------------------------------------------------- losses: (value, slope in logp)


def cispo(case, i, t, a):
    ratio = math.exp(case.now[i][t] - case.old[i][t])
    push = min(max(ratio, 0.0), 5.0) * a
    return -push * case.now[i][t], -push


def ppo(low, high):
    def loss(case, i, t, a):
        ratio = math.exp(case.now[i][t] - case.old[i][t])
        bounded = min(max(ratio, 1.0 - low), 1.0 + high)
        if -ratio * a >= -bounded * a:
            return -ratio * a, -ratio * a
        return -bounded * a, 0.0

    return loss


def reinforce(case, i, t, a):
    return -a * case.now[i][t], -a


def band(case, i, t, a):
    ratio = math.exp(case.now[i][t] - case.mu[i][t])
    push = ratio * a if 0.7 < ratio < 6.0 else 0.0
    return -push * case.now[i][t], -push


# ----------------------------------------------------------------------------- weights


def rho(case, i):
    return [math.exp(old - mu) for old, mu in zip(case.old[i], case.mu[i], strict=True)]


def mismatch(case, i):
    """Weight of each token, None for one that is rejected."""
    ratios = rho(case, i)
    if any(x > 20.0 for x in ratios):
        return [None] * len(ratios)
    return [min(max(x, 0.5), 5.0) if 0.5 <= x <= 5.0 else None for x in ratios]


def binary_kl(case, i):
    total = 0.0
    for old, mu in zip(case.old[i], case.mu[i], strict=True):
        p, q = (min(max(math.exp(x), 1e-6), 1 - 1e-6) for x in (mu, old))
        total += p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
    kept = total / len(case.old[i]) <= 3e-3
    return rho(case, i) if kept else [None] * len(case.old[i])


def ones(case, i):
    return [1.0] * len(case.now[i])


def token_mean(case, members, advantages, loss, weigh=ones):
    """Over kept tokens: (loss, {response: slope of each token})."""
    total, slopes, kept = 0.0, {}, 0
    for i in members:
        slopes[i] = [0.0] * len(case.now[i])
        for t, weight in enumerate(weigh(case, i)):
            if weight is not None:
                value, slope = loss(case, i, t, advantages[i][t])
                total += weight * value
                slopes[i][t] = weight * slope
                kept += 1
    return total / kept, {i: [x / kept for x in one] for i, one in slopes.items()}


def response_mean(case, members, advantages, loss, weigh=ones, length=None):
    """1/B sum_i 1/T_i sum_t, or 1/length in the place of 1/T_i; rejected tokens still count."""
    total, slopes = 0.0, {}
    for i in members:
        share = 1.0 / ((length or len(case.now[i])) * len(members))
        slopes[i] = [0.0] * len(case.now[i])
        for t, weight in enumerate(weigh(case, i)):
            if weight is not None:
                value, slope = loss(case, i, t, advantages[i][t])
                total += share * weight * value
                slopes[i][t] = share * weight * slope
    return total, slopes


# ----------------------------------------------------------------------- the critic's side


def value_mse(case, members, targets, *, clip, first_alone=False):
    """(plain mean squared error, optimised loss, slope of each token)."""
    plain, total, slopes, count = 0.0, 0.0, {}, 0
    for i in members:
        slopes[i] = [0.0] * len(case.now[i])
        for t in case.tokens(i):
            if first_alone and t:
                continue
            v, old, target = case.values[i][t], case.values_old[i][t], targets[i][t]
            plain += (v - target) ** 2
            near = v if clip is None else old + min(max(v - old, -clip), clip)
            larger = (near - target) ** 2 > (v - target) ** 2
            total += 0.5 * max((v - target) ** 2, (near - target) ** 2)
            # The clipped one has no slope where the clip holds it, and elsewhere it is the plain.
            slopes[i][t] = 0.0 if larger else v - target
            count += 1
    slopes = {i: [x / count for x in one] for i, one in slopes.items()}
    return plain / count, total / count, slopes


def outcome(case):
    return over_tokens(case, case.reward)


def lambda_return(case, lam):
    pairs = zip(gae(case, lambda _: lam), case.values_old, strict=True)
    return [[a + v for a, v in zip(*pair, strict=True)] for pair in pairs]


# ------------------------------------------------- methods: (actor's side, critic's or None)


def s3ac(case, members):
    advantages = gae(case, adaptive(1.5))
    actor = token_mean(case, members, advantages, cispo, mismatch)
    return actor, value_mse(case, members, outcome(case), clip=0.5)


def grpo(case, members):
    advantages = relative(case, divide=True)
    return response_mean(case, members, advantages, ppo(0.2, 0.2)), None


def dr_grpo(case, members):
    advantages = relative(case, divide=False)
    return response_mean(case, members, advantages, ppo(0.2, 0.2), length=3000), None


def dapo(case, members):
    """Soft overlong penalty: 0 up to 9 of 12 tokens, then linear down to -1."""
    shaped = [
        reward + min(0.0, max(-1.0, (LIMIT - 3 - number) / 3))
        for reward, number in zip(case.reward, LENGTHS, strict=True)
    ]
    assert shaped[2] == 0.0  # right, and as long as can be
    advantages = relative(dataclasses.replace(case, reward=shaped), divide=True)
    return token_mean(case, members, advantages, ppo(0.2, 0.28)), None


def grpo_x(case, members):
    advantages = gepo(case, relative(case, divide=True))
    return token_mean(case, members, advantages, ppo(0.2, 0.28), mismatch), None


def reinforce_pp(case, members):
    return token_mean(case, members, whitened(outcome(case)), ppo(0.2, 0.2)), None


def reinforce_pp_baseline(case, members):
    advantages = whitened(relative(case, divide=False))
    return token_mean(case, members, advantages, ppo(0.2, 0.2)), None


def flash_reinforce(case, members):
    mean = sum(case.reward) / len(case.reward)
    advantages = over_tokens(case, [reward - mean for reward in case.reward])
    return response_mean(case, members, advantages, reinforce, binary_kl), None


def spo(case, members):
    surprise = [float(won) - v for won, v in zip(SUCCESS, BASELINE, strict=True)]
    mean = sum(surprise) / len(surprise)
    std = math.sqrt(sum((x - mean) ** 2 for x in surprise) / len(surprise))
    advantages = over_tokens(case, [(x - mean) / std for x in surprise])
    return token_mean(case, members, advantages, ppo(0.2, 0.28)), None


def pcl(case, members):
    actor = token_mean(case, members, relative(case, divide=False), ppo(0.2, 0.2))
    return actor, value_mse(case, members, outcome(case), clip=None, first_alone=True)


def ppo_method(case, members):
    advantages = whitened(gae(case, lambda _: 0.95))
    actor = token_mean(case, members, advantages, ppo(0.2, 0.2))
    return actor, value_mse(case, members, lambda_return(case, 0.95), clip=0.5)


def vc_ppo(case, members):
    actor, _ = ppo_method(case, members)
    return actor, value_mse(case, members, outcome(case), clip=0.5)


def vapo(case, members):
    loss, slopes = token_mean(
        case, members, whitened(gae(case, adaptive(0.05))), ppo(0.2, 0.28)
    )  # fmt: skip
    right = [i for i in members if SUCCESS[i]]
    number = sum(len(case.now[i]) for i in right)
    for i in right:
        loss -= 0.1 * sum(case.now[i]) / number
        slopes[i] = [slope - 0.1 / number for slope in slopes[i]]
    return (loss, slopes), value_mse(case, members, outcome(case), clip=0.5)


def sao(case, members):
    actor = token_mean(case, members, gae(case, adaptive(1.5)), band)
    return actor, value_mse(case, members, outcome(case), clip=0.5)


ORACLES = {
    "s3ac_single": s3ac,
    "s3ac_group": s3ac,
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "dapo": dapo,
    "grpo_x": grpo_x,
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": reinforce_pp_baseline,
    "flash_reinforce": flash_reinforce,
    "spo": spo,
    "pcl": pcl,
    "ppo": ppo_method,
    "vc_ppo": vc_ppo,
    "vapo": vapo,
    "sao": sao,
}
