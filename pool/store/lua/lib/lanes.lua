-- Jobs that wait for their turn (the rules are those of pool/rules/fairness.py). A flow is one fairness key in one lane,
-- `LANE:KEY`; a turn, `FLOW:ORDER:TOKEN:N:WEIGHT:CAP`, is the place of a job in it. `backlog` (zset) holds the turns of the
-- jobs that wait, `flows` (zset) the virtual time of each flow. A turn ends with `:SESSION` where its job has one.
-- GROUP lanes backlog flows fairness

-- A flow's score is its virtual time in a band of its lane; above are those of flows of which nothing waits. A key of which
-- nothing has ended lately is taken to need so long for a choice.
local BAND, LANES, FIRST_GUESS_MS = 2 ^ 47, 3, 1000

-- The bound of a range of scores: Lua's own way of writing numbers has 14 digits.
local function below(score)
  return string.format('(%.0f', score)
end

local function band_of(lane, rests)
  return (rests and lane + LANES or lane) * BAND
end

-- The parts of a turn: all but the last three have a fixed length.
local function lane_of(turn) return tonumber(string.sub(turn, 1, 1)) end
local function flow_of(turn) return string.sub(turn, 1, 18) end
local function key_of(turn) return string.sub(turn, 3, 18) end
local function token_of(turn) return string.sub(turn, 38, 69) end

-- Choices, weight and cap; and the fields of its entry that say its session.
local NONE = {}
local function terms_of(turn)
  local terms = string.sub(turn, 71)
  if terms == '1:1:0' then return 1, 1, 0, NONE end
  local n, weight, cap, session = string.match(terms, '^(%d+):(%d+):(%d+):?(%x*)$')
  return tonumber(n), tonumber(weight), tonumber(cap), session == '' and NONE or {'session', session}
end

-- What a job is charged with whose choices take `ms` each: in eighths, which scores hold exactly, so that taking it back does.
local function weighed(ms, n, weight)
  return math.floor(ms * n / weight * 8 + 0.5) / 8
end

-- The virtual time at which a flow begins that was not served lately: the least of those that wait, or that of the flow that
-- was served last, before its job was charged, where that is less.
local function floor_of(lane)
  local band = band_of(lane)
  local least = redis.call('ZRANGEBYSCORE', lanes.flows, band, below(band + BAND), 'WITHSCORES', 'LIMIT', 0, 1)
  local clock = tonumber(redis.call('HGET', lanes.fairness, 'clock:' .. lane) or 0)
  return least[2] and math.min(least[2] - band, clock) or clock
end

-- A job begins to wait.
local function join(turn)
  local lane, flow = lane_of(turn), flow_of(turn)
  redis.call('ZADD', lanes.backlog, 0, turn)
  local score = tonumber(redis.call('ZSCORE', lanes.flows, flow) or nil)
  if score and score < band_of(0, true) then return end
  local own = score and score - band_of(lane, true) or 0
  redis.call('ZADD', lanes.flows, band_of(lane) + math.max(own, floor_of(lane)), flow)
end
