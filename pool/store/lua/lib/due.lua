-- Timers of jobs and Programs that are due.
local REASONS = {
  queue = {'queue_timeout', 'No worker began it within its queue timeout.'},
  run = {'run_timeout', 'It did not end within its run timeout.'},
  deadline = {'deadline_exceeded', 'Its deadline passed before it ended.'},
  wait_deadline = {'deadline_exceeded', 'The deadline_seconds of its context passed before it began.'},
}

-- The reply when the timer of this kind is not to be carried out now.
local function not_due(timers, sweep, kind, token, lease, at_ms)
  local timer = kind .. ':' .. token
  local due_ms = redis.call('ZSCORE', timers, timer)
  if not due_ms then return {'void'} end
  if tonumber(due_ms) > at_ms then return {'early'} end
  -- As with leases: after a gap in the sweeps a reader has a lease's time to say that it is there. So have workers to begin
  -- or end what timed out in the gap; a deadline is a point in time. Put off, a timer is not in the way of those behind it.
  local hold_until_ms, back_ms = gap_of(sweep, lease, at_ms)
  local in_gap = tonumber(due_ms) <= back_ms
  if hold_until_ms > at_ms and (kind == 'reader' or kind ~= 'deadline' and in_gap) then
    redis.call('ZADD', timers, hold_until_ms, timer)
    return {'early'}
  end
end

-- The fields of a job that fails by this timer.
local function reason_of(kind)
  return {'error_code', REASONS[kind][1], 'error_message', REASONS[kind][2]}
end
