"""Scripts, played side by side."""

import torch
from constant_teacher import BATCH

from wandistiller.batch import STUDENT, Prediction, State
from wandistiller.objectives.script import TEACHER, Ask, Learn, Loss, Script, joined


def output(value: float) -> Prediction:
    return Prediction(torch.full_like(BATCH.x_t_BCFHW, value))


def difference(state: State, blocks: tuple[int, ...] = ()) -> Script:
    """The mean difference of what learns from the teacher."""
    teacher = yield Ask(TEACHER, state, blocks)
    student = yield Learn(state)
    return Loss((student.v_BCFHW - teacher.v_BCFHW).flatten(1).mean(1)[None])


def test_joined_scripts_ask_once_about_a_state_and_learn_in_one_pass() -> None:
    def ask_later(state: State) -> Script:
        rest = yield Ask(STUDENT, state)
        teacher = yield Ask(TEACHER, state)
        student = yield Learn(state)
        return Loss((student.v_BCFHW - teacher.v_BCFHW - rest.v_BCFHW).flatten(1).mean(1)[None])

    script = joined([difference(BATCH, (3,)), difference(BATCH, (1,)), ask_later(BATCH)])
    rounds = [next(script)]
    rounds.append(script.send([output(1.0), output(10.0)]))  # the teacher's, blocks 1 and 3; the student's
    rounds.append(script.send([output(2.0)]))  # the teacher's, for the one that asks later
    try:
        script.send([output(3.0)])
    except StopIteration as end:
        rows = [loss.rows_TB[0, 0].item() for loss in end.value]
    asked = [[(type(q), q.role, getattr(q, "blocks", ())) for q in one] for one in rounds]
    assert asked[0] == [(Ask, TEACHER, (1, 3)), (Ask, STUDENT, ())]
    assert asked[1:] == [[(Ask, TEACHER, ())], [(Learn, STUDENT, ())]]
    assert rows == [2.0, 2.0, -9.0]


def test_joined_scripts_learn_once_with_each_network_the_later_one_after_what_others_ask() -> None:
    def of_two(state: State) -> Script:
        student = yield Learn(state)
        teacher, critic = yield [Ask(TEACHER, state), Learn(state, "critic")]
        difference_B = (teacher.v_BCFHW - student.v_BCFHW).flatten(1).mean(1)
        return {STUDENT: Loss(difference_B[None]), "critic": Loss(critic.v_BCFHW.flatten(1).mean(1)[None])}

    script = joined([difference(BATCH), of_two(BATCH)])
    rounds, given = [next(script)], iter([[1.0], [2.0], [4.0, 8.0]])
    for values in given:
        try:
            rounds.append(script.send([output(value) for value in values]))
        except StopIteration as end:
            one, two = end.value
    assert [[(type(q), q.role) for q in one] for one in rounds] == [
        [(Ask, TEACHER)],
        [(Learn, STUDENT)],
        [(Ask, TEACHER), (Learn, "critic")],
    ]
    found = [one.rows_TB, two[STUDENT].rows_TB, two["critic"].rows_TB]
    assert [rows_TB[0, 0].item() for rows_TB in found] == [1.0, 2.0, 8.0]
