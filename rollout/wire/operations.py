"""The closed list of operations, and which of them each socket takes; read by the codec and by whoever names an operation."""

from __future__ import annotations

import enum


class Op(enum.IntEnum):
    """Operation numbers; a number is never reused for another meaning."""

    HELLO = 1
    WELCOME = 2
    HEARTBEAT = 3
    ALIVE = 4
    GOODBYE = 5
    ERROR = 6
    DONE = 7

    GENERATE = 16
    ATTACH = 17
    CANCEL = 18
    CANCEL_RESULT = 19
    DELTAS = 20
    ACK = 21
    SCORE = 22
    SCORED = 23
    GENERATE_GROUP = 24
    TOOL_WAIT = 25

    INFO = 32
    INFO_RESULT = 33
    STATS = 34
    STATS_RESULT = 35
    TOKENIZER_FILES = 36
    TOKENIZER_FILES_RESULT = 37

    PAUSE = 48
    RESUME = 49
    WEIGHTS_BEGIN = 50
    WEIGHTS_TICKET = 51
    WEIGHTS_STAGE_FILE = 52
    WEIGHTS_COMMIT = 53
    WEIGHTS_REPORT = 54
    WEIGHTS_ABORT = 55
    SHUTDOWN = 56
    WEIGHTS_STAGE_BUCKET = 57
    WEIGHTS_JOIN_GROUP = 58
    EVALUATE_BEGIN = 60
    EVALUATION = 61
    EVALUATE_END = 62
    SLEEP = 63
    WAKE = 64

    HOST_READY = 80
    HOST_FAILED = 81
    SUBMIT = 82
    STEP = 83
    STEP_ACK = 84
    KILL = 85
    UPDATE_OPEN = 86
    EXPECT_RETURN = 87
    END_HINTS = 88
    HOST_LOADING = 89


DATA_REQUESTS = frozenset(
    {
        Op.HELLO,
        Op.HEARTBEAT,
        Op.GOODBYE,
        Op.GENERATE,
        Op.GENERATE_GROUP,
        Op.TOOL_WAIT,
        Op.ATTACH,
        Op.CANCEL,
        Op.ACK,
        Op.SCORE,
        Op.INFO,
        Op.STATS,
        Op.TOKENIZER_FILES,
    }
)
CONTROL_REQUESTS = frozenset(
    {
        Op.HELLO,
        Op.PAUSE,
        Op.RESUME,
        Op.WEIGHTS_BEGIN,
        Op.WEIGHTS_STAGE_FILE,
        Op.WEIGHTS_STAGE_BUCKET,
        Op.WEIGHTS_JOIN_GROUP,
        Op.WEIGHTS_COMMIT,
        Op.WEIGHTS_ABORT,
        Op.SHUTDOWN,
        Op.EVALUATE_BEGIN,
        Op.EVALUATE_END,
        Op.SLEEP,
        Op.WAKE,
    }
)
CLIENT_REPLIES = frozenset(
    {
        Op.WELCOME,
        Op.ALIVE,
        Op.ERROR,
        Op.DONE,
        Op.CANCEL_RESULT,
        Op.DELTAS,
        Op.SCORED,
        Op.INFO_RESULT,
        Op.STATS_RESULT,
        Op.TOKENIZER_FILES_RESULT,
        Op.WEIGHTS_TICKET,
        Op.WEIGHTS_REPORT,
        Op.EVALUATION,
    }
)
HOST_REQUESTS = frozenset(
    {
        Op.SUBMIT,
        Op.STEP_ACK,
        Op.KILL,
        Op.EXPECT_RETURN,
        Op.END_HINTS,
        Op.SCORE,
        Op.STATS,
        Op.PAUSE,
        Op.RESUME,
        Op.UPDATE_OPEN,
        Op.WEIGHTS_STAGE_FILE,
        Op.WEIGHTS_STAGE_BUCKET,
        Op.WEIGHTS_JOIN_GROUP,
        Op.WEIGHTS_COMMIT,
        Op.WEIGHTS_ABORT,
        Op.SLEEP,
        Op.WAKE,
        Op.SHUTDOWN,
    }
)
HOST_REPLIES = frozenset(
    {
        Op.HOST_LOADING,
        Op.HOST_READY,
        Op.HOST_FAILED,
        Op.STEP,
        Op.ERROR,
        Op.DONE,
        Op.CANCEL_RESULT,
        Op.SCORED,
        Op.STATS_RESULT,
        Op.WEIGHTS_REPORT,
    }
)
