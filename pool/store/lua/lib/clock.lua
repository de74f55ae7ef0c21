-- The state server's clock in us, as 16 digits, and in ms: no node's clock decides anything.
local function now_us()
  local time = redis.call('TIME')
  return string.format('%s%06d', time[1], time[2])
end

local function now_ms()
  return math.floor(now_us() / 1000)
end
