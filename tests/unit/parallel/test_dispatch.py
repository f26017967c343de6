"""Programs of several threads come to the devices one after the other."""

import threading
import time

from s3ac_jax.parallel.dispatch import in_order


def test_two_programs_are_never_handed_over_at_once():
    inside, most = [], []

    def program(number):
        inside.append(number)
        most.append(len(inside))
        time.sleep(0.002)
        inside.remove(number)
        return number + 1

    first, second = in_order(program), in_order(lambda number: program(number))
    found = []
    threads = [
        threading.Thread(target=lambda one=one: found.extend(one(n) for n in range(20)))
        for one in (first, second)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(most) == 1
    assert len(most) == 40
    assert sorted(found) == sorted([*range(1, 21)] * 2)


def test_a_program_may_call_another():
    inner = in_order(lambda: 3)
    assert in_order(lambda: inner() + 1)() == 4


def test_what_is_none_or_in_order_stays_as_it_is():
    program = in_order(max)
    assert in_order(program) is program
    assert program(2, 3) == 3
    assert in_order(None) is None
