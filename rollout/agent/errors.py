"""The agent side's part of the service's exception tree.

RolloutError
└── AgentError                            agent_error
    ├── ChatFormatError (ValueError)      chat_format_invalid     tokenizer files or template cannot be used
    ├── TokenizerMismatch (ValueError)    tokenizer_mismatch      the service serves another tokenizer
    ├── UntrustedControlToken (ValueError) untrusted_control_token  plain text that only encodes to a control id
    ├── InvalidEpisode (ValueError)       invalid_episode         an option of an episode is outside its domain
    ├── EpisodeStateError (RuntimeError)  episode_state           a call that this state does not allow
    ├── IncompleteGeneration (RuntimeError) incomplete_generation a generation lacks a value for a sampled token
    ├── InvalidTool (ValueError)          invalid_tool            a function that cannot be offered as a tool
    ├── ToolFailed (RuntimeError)         tool_failed             a tool broke and was declared essential
    ├── InvalidEnvironment (ValueError)   invalid_environment     an environment returned what it must not
    ├── PhaseTimeout (TimeoutError)       phase_timeout           a phase of an episode took too long
    └── InfrastructureFailure (RuntimeError) infrastructure_failure what an environment or a tool stands on is away; raise it yourself
"""

from __future__ import annotations

from rollout.errors import RolloutError


class AgentError(RolloutError):
    """Base of the agent side's errors."""

    code = "agent_error"


class ChatFormatError(AgentError, ValueError):
    """The tokenizer files or the chat template cannot be used."""

    code = "chat_format_invalid"


class TokenizerMismatch(AgentError, ValueError):
    """An episode's tokenizer is not the one that the service serves."""

    code = "tokenizer_mismatch"


class UntrustedControlToken(AgentError, ValueError):
    """The tokenizer turns plain text into a control id whatever is done, so the text is refused."""

    code = "untrusted_control_token"


class InvalidEpisode(AgentError, ValueError):
    """An option of an episode is outside its domain."""

    code = "invalid_episode"


class EpisodeStateError(AgentError, RuntimeError):
    """The episode's state does not allow this call."""

    code = "episode_state"


class IncompleteGeneration(AgentError, RuntimeError):
    """A generation came back without a value that every sampled token needs."""

    code = "incomplete_generation"


class InvalidTool(AgentError, ValueError):
    """A function or schema cannot be offered as a tool."""

    code = "invalid_tool"


class ToolFailed(AgentError, RuntimeError):
    """A tool broke, and its failure ends the episode."""

    code = "tool_failed"


class InvalidEnvironment(AgentError, ValueError):
    """An environment returned something that the runner cannot use."""

    code = "invalid_environment"


class PhaseTimeout(AgentError, TimeoutError):
    """A phase of an episode took longer than it may."""

    code = "phase_timeout"


class InfrastructureFailure(AgentError, RuntimeError):
    """What an environment or a tool stands on (a sandbox, a database) is away: nobody's doing, and another attempt may succeed.

    Environments and tools raise it themselves. The episode then fails as the infrastructure's, and a group plays the member again.
    """

    code = "infrastructure_failure"
