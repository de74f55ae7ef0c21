-- How many choices a tenant holds, of those that are counted for it (submit.lua). A job whose record was deleted from
-- outside has never ended, and would count for ever: such are dropped, but looked for only when they would matter, that
-- is when the tenant holds more than `room`.
local function owned(tenants, index, tenant, room)
  local first, last = '[' .. tenant .. ':', '(' .. tenant .. ';'
  local count = redis.call('ZLEXCOUNT', tenants, first, last)
  if count <= room then return count end
  for _, member in ipairs(redis.call('ZRANGEBYLEX', tenants, first, last)) do
    if not redis.call('ZSCORE', index, string.sub(member, #tenant + 2)) then
      redis.call('ZREM', tenants, member)
      count = count - 1
    end
  end
  return count
end
