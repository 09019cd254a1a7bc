/* losses.h - for ops.h: the structs of the loss head's ops: teachers, whole answers, preferences. */
#ifndef MT_LOSSES_H
#define MT_LOSSES_H

#include "kernels/tensor.h"

/* The teacher's distribution q over the vocabulary, at `temperature` T, for each labelled token. It is given as the
 * teacher's final hidden state, from which the student's head computes logits, or as K ids with log q (id -1: no
 * entry). With ids, all other ids are one bucket of probability q_r = max(0, 1 - sum q_k). KL_REVERSE needs hidden
 * states. */
enum kl_kind { KL_FORWARD, KL_REVERSE };
struct teacher {
    enum kl_kind kind;
    float alpha, temperature;  /* share of the cross-entropy in the loss, [0, 1]; T > 0 */
    struct tensor hidden;      /* [N, D] act, after the final norm; or absent */
    struct tensor id, logprob; /* [N, K] i32, stat: distinct ids, log softmax(z / T); or absent */
};
/* The answers of a micro-batch whose loss is over whole answers. Labels [cu[a], cu[a+1]) are of answer a; those from
 * first[a] on are its completion, those before it of its prompt. */
struct answers {
    struct tensor cu, first; /* [A+1], [A] i32 */
};
/* What a preference objective computes of a pair of answers (chosen, rejected), of KTO of one; KL: the log-ratio of
 * KTO's baseline alone. preference_value.h has the formulas. */
enum preference_kind {
    PREFERENCE_DPO,
    PREFERENCE_IPO,
    PREFERENCE_SIMPO,
    PREFERENCE_ORPO,
    PREFERENCE_KTO,
    PREFERENCE_KL
};
struct preference {
    enum preference_kind kind;
    double beta, gamma, label_smoothing, desirable, undesirable;
    double sft_weight; /* of the cross-entropy of the chosen completions, a mean over their tokens in the step */
    double baseline;   /* KTO: z */
    double scale;      /* 1 / pairs (rows) of the step */
    double sft_scale;  /* sft_weight / tokens of chosen completions in the step */
};
/* Sums over pairs, or rows of KTO; the last five of chosen, then of rejected answers. */
enum preference_sum {
    PREFERENCE_LOSS,
    PREFERENCE_RIGHT, /* pairs whose chosen reward is the larger */
    PREFERENCE_NLL,   /* ORPO: means per token */
    PREFERENCE_RATIO, /* KL: log-ratios; KTO: the baseline, for its mean over steps */
    PREFERENCE_SIDES,
    PREFERENCE_REWARD = PREFERENCE_SIDES,
    PREFERENCE_LOGP,   /* as the objective reads them: of SimPO and ORPO means per token */
    PREFERENCE_TOTAL,  /* log-probabilities of completions */
    PREFERENCE_TOKENS, /* of completions */
    PREFERENCE_ANSWERS,
    PREFERENCE_SIDE = PREFERENCE_ANSWERS - PREFERENCE_SIDES + 1,
    PREFERENCE_SUMS = PREFERENCE_SIDES + 2 * PREFERENCE_SIDE
};

/* What op_preference writes and reads: sums [PREFERENCE_SUMS] f64 += ; weight [A,2] stat = : of the loss, dloss/dnll of
 * each label of the completion, and of the prompt; logps, reference [A,2] f64 of op_answer_sums, reference those of a
 * frozen model or absent; good [A] i32: KTO's labels, or absent. */

#endif
